"""The run folder: settings, environment, metrics, checkpoints, summary. All that compare reads.

Enters: what a run writes, and reads again to go on. Not: what it computes; how it is compared.
"""
