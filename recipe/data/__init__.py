"""From files to batches: listing, order, decoding, augmentation, shards, memory; and the commands
that prepare data.

Enters: what decides which pixels a rank gets, and when. Not: the network, metrics.
"""
