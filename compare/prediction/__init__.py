"""Predictions for more workers: inputs from measured runs, networks, and a model of the step.

Belongs here: pure functions of figures. Not here: how a prediction is shown (page), torch.
"""
