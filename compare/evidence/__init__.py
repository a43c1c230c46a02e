"""What run folders show: records are read and checked, and give paired ratios, rows of tables and
verdicts.

Belongs here: pure functions of files and figures. Not here: starting runs, the report's sentences,
drawing, torch.
"""
