"""The report: text, tables, plots and the HTML page, from findings alone; and the
tables of all-reduces and predictions.

Enters: how findings are shown. Not: what a comparison's are (evidence), torch, numpy.
"""
