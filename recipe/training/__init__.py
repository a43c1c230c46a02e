"""What is computed in a step: network, optimizer, learning rate, metrics.

Belongs here: what changes or measures the weights. Not here: engines, files of the run folder.
"""
