"""The settings of a run: flags and presets, read from the command line and checked.

Belongs here: a setting, its default, its bounds, and which settings fit together. Not here: what a
setting does. Imports nothing slow, neither torch nor an engine.
"""
