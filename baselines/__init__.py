"""Ways to train besides the two engines: without an engine, with MPI alone, the ladder's rungs.

Belongs here: one file for each way, on top of the recipe. Not here: what they share (recipe.loop).
"""
