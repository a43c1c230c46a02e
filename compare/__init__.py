"""The comparison. At the top the commands; below, what they share.

Packages, each above the one before: for_scripts, plan, evidence, running; and page, above evidence.
Trainers are started as users start them; none is imported.
"""
