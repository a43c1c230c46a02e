"""What row 9 compares our Horovod path with: a training loop as people write it after reading
Horovod's documentation, by the method of its synthetic benchmark.

    horovodrun -np 2 python benchmarks/programs/plain_horovod.py --arch resnet50 --batch-size 32

fp32, contiguous (NCHW) images, one fixed random batch that lies on the device, SGD wrapped in
DistributedOptimizer with its defaults, parameters and optimizer state broadcast once.
"""

import os
import time

import torch
import torch.nn.functional as F
import torchvision

from benchmarks.programs.bare_loop import loop_parser
from compare.running import take_turns
from recipe.world import prepare_mpi, read_world

YIELDS = "OMPI_MCA_mpi_yield_when_idle"


def main() -> None:
    """Train until --steps, or for ever."""
    options = loop_parser("plain_horovod", __doc__).parse_args()

    was_set = YIELDS in os.environ
    prepare_mpi(read_world())  # without it no single process starts on Open MPI's wheel ...
    if not was_set:  # ... but what else it sets is ours, not a plain script's
        os.environ.pop(YIELDS, None)
    import horovod.torch as hvd

    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    if options.threads:
        torch.set_num_threads(options.threads)

    network = torchvision.models.get_model(options.arch, weights=None).to(device)
    sgd = torch.optim.SGD(network.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    size = options.train_crop_size
    images = torch.randn(options.batch_size, 3, size, size, device=device)
    labels = torch.randint(0, 1000, (options.batch_size,), device=device)
    began, step = time.perf_counter(), 0
    while options.steps is None or step < options.steps:
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
        step += 1
        take_turns.step_ended()
    take_turns.synchronize()
    if hvd.rank() == 0:
        images_made = step * options.batch_size * hvd.size()
        print(f"{images_made / (time.perf_counter() - began):.1f} images/s")
    hvd.shutdown()


if __name__ == "__main__":
    main()
