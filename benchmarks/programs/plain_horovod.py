"""The reference for our Horovod trainer (row 9): a training loop as people write it after reading
Horovod's documentation, by the method of Horovod's synthetic benchmark.

    horovodrun -np 2 python benchmarks/programs/plain_horovod.py --arch resnet50 --batch-size 32

fp32, contiguous (NCHW) images, one fixed random batch on the device, SGD wrapped in
DistributedOptimizer with its defaults, parameters and optimizer state broadcast once.
"""

import os

import torch
import torch.nn.functional as F
import torchvision
import tyro

from benchmarks.programs.bare_loop import take_steps
from recipe.world import prepare_mpi, read_world

YIELDS = "OMPI_MCA_mpi_yield_when_idle"


def main(
    arch: str = "resnet50",
    train_crop_size: int = 224,
    batch_size: int = 32,
    threads: int | None = None,
    steps: int | None = None,
) -> None:
    """Train until `steps`, or for ever.

    Args:
        arch: A classification model of torchvision.
        train_crop_size: Side of the images, pixels.
        batch_size: Images per step and rank.
        threads: CPU threads (default: torch's).
        steps: End after this number of steps (default: never).
    """
    was_set = YIELDS in os.environ
    prepare_mpi(read_world())  # a single process cannot start on Open MPI's wheel without it
    if not was_set:  # but a plain script would not have this variable
        os.environ.pop(YIELDS, None)
    import horovod.torch as hvd

    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = False  # like the trainer in fp32
    if threads:
        torch.set_num_threads(threads)

    network = torchvision.models.get_model(arch, weights=None).to(device)
    sgd = torch.optim.SGD(network.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(batch_size, 3, train_crop_size, train_crop_size, device=device)
    labels = torch.randint(0, 1000, (batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()

    images_per_second = take_steps(step, steps, batch_size)
    if hvd.rank() == 0:
        print(f"{images_per_second * hvd.size():.1f} images/s")
    hvd.shutdown()


if __name__ == "__main__":
    tyro.cli(main, prog="benchmarks/programs/plain_horovod.py", description=__doc__)
