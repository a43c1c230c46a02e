"""What the record of a comparison shows: it is read and checked, and gives paired ratios, rows of
tables and verdicts.

Belongs here: pure functions of files and figures; only record.py writes. Not here: starting runs,
the report's sentences, drawing, torch.
"""
