"""What more workers would bring: inputs from measured runs, networks, and a model of the step.

Enters: pure functions of figures. Not: how a prediction is shown (page), torch.
"""
