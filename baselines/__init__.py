"""Ways of training beside the two engines: without any, by MPI alone, and the ladder's rungs.

Belongs here: one file for each way, on top of the recipe. Not here: what they share (recipe.loop).
"""
