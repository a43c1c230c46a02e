"""The report as text, tables, plots and an HTML page, made from findings alone; and the tables of
all-reduces and predictions.

Enters: how findings are shown. Not: computing them (evidence), torch, numpy.
"""
