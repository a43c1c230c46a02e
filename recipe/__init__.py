"""The training recipe: all that does not know which library moves the gradients.

Here at the top: settings (flags, presets, config, knobs, variables), rank facts (world), devices,
files, errors, and the tools that prepare data. Below, each above the one before: data, training,
record. No engine, no MPI.
"""
