"""The training recipe: all that does not know which library moves the gradients.

Here at the top: rank facts (world), how ranks meet, devices, files, errors, the session and the
rungs' loop. In folders, each above the one before: settings, data (with the commands that prepare
it), training, record. No engine, no MPI.
"""
