"""The Horovod side: the trainer, the build of Horovod, and its all-reduce alone.

Enters: what needs `hvd`. Not: what both engines share (recipe), torch.distributed.
"""
