"""The training recipe: all that does not know which library moves the gradients.

Here at the top: settings (config, knobs), rank facts (world), devices, errors, and the tools that
prepare data. Below, each above the one before: data, training, record. No engine, no MPI.
"""
