"""The DDP side: the trainer, where its ranks meet, its buckets, and its all-reduce alone.

Belongs here: what needs torch.distributed. Not here: what both engines share (recipe), Horovod.
"""
