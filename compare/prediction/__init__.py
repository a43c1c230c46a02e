"""What more workers would bring: inputs from measured runs, networks, and a model of the step.

Enters: pure functions of figures, small enough to be written in JavaScript as well. Not: how a
prediction is shown (page), torch.
"""
