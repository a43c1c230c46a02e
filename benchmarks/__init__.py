"""How fast the recipe and its engines are, against what they could be: `make bench`.

Each file is a row of the table, or `run.py`, which measures all. `harness/` is what they share.
"""
