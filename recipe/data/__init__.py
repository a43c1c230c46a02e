"""From files to batches: listing, order, decoding, augmentation, shards, memory; and the commands
that prepare data.

Belongs here: what decides which pixels a rank gets, and when. Not here: the network, metrics.
"""
