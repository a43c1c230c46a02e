"""The DDP side: the trainer, where its ranks meet, its buckets, and its all-reduce alone.

Enters: what needs torch.distributed. Not: what both engines share (recipe), Horovod.
"""
