"""What run folders show: records read and checked, paired ratios, tables, and verdicts.

Enters: pure functions of files and figures. Not: starting runs, drawing, torch.
"""
