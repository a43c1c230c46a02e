"""Doing a plan: checks before the first run, launches and their end, blocks, tuning.

Enters: whatever starts, watches or ends processes. Not: statistics, what a report says.
"""
