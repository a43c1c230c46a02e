"""The speed of the recipe and its engines against their goals: `make bench`.

plans/ and gpu_plans/ hold the plans with their goals; compare/run.py measures them. programs/ holds
the programs that they start. wire-format.toml is measured at several rates of the network.
"""
