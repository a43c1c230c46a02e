"""The comparison. At the top the commands; below, what they share.

Packages, each above the one before: evidence, plan, running; and page, above evidence and plan.
Trainers are started as users start them; none is imported.
"""
