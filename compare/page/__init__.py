"""The report: text, tables, plots and the HTML page, from findings alone.

Enters: how findings are shown. Not: what they are (evidence), torch, numpy.
"""
