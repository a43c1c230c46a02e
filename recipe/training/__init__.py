"""What is computed in a step: network, optimizer, learning rate, metrics.

Enters: what changes the weights or measures them. Not: engines, files of the run folder.
"""
