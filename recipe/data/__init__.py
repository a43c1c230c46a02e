"""From files to batches: listing, order, decoding, augmentation, shards, memory.

Enters: what decides which pixels a rank gets, and when. Not: the network, metrics.
"""
