"""Ways of training beside the two engines: without any, by MPI alone, and the ladder's rungs.

Enters: one way a file, over the recipe. Not: what they have in common (recipe.loop).
"""
