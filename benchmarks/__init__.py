"""How fast the recipe and its engines are, against what they could be: `make bench`.

plans/ and gpu_plans/ have the goals, which compare/run.py measures; programs/ is what they start.
wire-format.toml is measured at several rates.
"""
