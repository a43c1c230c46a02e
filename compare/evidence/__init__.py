"""What run folders show: records are read and checked, and give paired ratios, tables and verdicts.

Enters: pure functions of files and figures. Not: starting runs, drawing, torch.
"""
