"""What is to be run: the plan (plan.py), its file and what is not valid in it (plan_file.py);
configurations, hosts, blocks, each run's command.

Enters: what can be said before the first run. Not: processes, results.
"""
