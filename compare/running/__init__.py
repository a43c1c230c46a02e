"""Carrying out a plan: checks before the first run, launches and their end, blocks.

Belongs here: everything that starts, watches or ends processes. Not here: statistics, reports.
"""
