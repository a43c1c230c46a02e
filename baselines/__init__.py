"""What the engines are held against: the training without an engine, the all-reduce of plain MPI.

Enters: programs with neither Horovod nor DDP. Not: what they have in common (recipe).
"""
