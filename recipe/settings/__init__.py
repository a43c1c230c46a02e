"""The settings of a run: flags, presets and knobs, read from the command line and checked.

Enters: a setting, its default, its bounds, and which settings go together. Not: what a setting
does. Imports nothing slow, neither torch nor an engine.
"""
