"""What is computed in a step: network, optimizer, learning rate, metrics, phases of the step.

Enters: what changes the weights or measures them. Not: engines, files of the run folder.
"""
