"""The run folder: settings, environment, metrics, checkpoints, summary. Of a run, compare/ reads
nothing else.

Belongs here: what a run writes, and reads again to resume. Not here: what it computes, or how runs
are compared.
"""
