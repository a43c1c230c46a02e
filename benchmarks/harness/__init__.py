"""What the rows share: sides that take turns, blocks, the record, the reference loops.

Enters: how something is measured. Not: what is measured against which goal (a row).
"""
