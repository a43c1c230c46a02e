"""What is to be run: configurations, hosts, blocks, and the command of each run.

Enters: what can be said before the first run. Not: processes, results.
"""
