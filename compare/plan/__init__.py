"""What to run: the plan (plan.py), its file and its checks (plan_file.py), configurations, hosts,
blocks, and the command of each run.

Belongs here: everything that is known before the first run. Not here: processes, results.
"""
