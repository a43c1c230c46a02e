"""The training recipe: everything that does not depend on which library exchanges the gradients.

At the top level: each rank's place (world), how ranks meet, devices, files, errors, the session and
the rungs' loop. In folders, each of which builds on those before it: settings, data (with the
commands that prepare it), training, record. No engine, no MPI.
"""
