"""The Horovod side: the trainer, the build of Horovod, and its all-reduce alone.

Belongs here: what needs `hvd`. Not here: what both engines share (recipe), torch.distributed.
"""
