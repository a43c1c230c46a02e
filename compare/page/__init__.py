"""The report as sentences, tables, plots and an HTML page, made from findings alone; and the
tables of all-reduces and predictions.

Belongs here: how findings are shown. Not here: computing them (evidence), torch, numpy.
"""
