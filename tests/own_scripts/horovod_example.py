"""A training as Horovod's example has it, for test_side.py: a wrapped optimizer under mpirun."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from comparison_side import Side
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Example")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=1_000_000)
parser.add_argument("--base-lr", type=float, default=0.1)
parser.add_argument("--no-weights", action="store_true")
args = parser.parse_args()


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 14 * 14, 10),
        )


hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
images = [torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(256)]
dataset = TensorDataset(torch.stack(images), torch.arange(256) % 10)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

model = Net()
# Without weight decay: broadcast_optimizer_state makes a step of zero gradients, which would decay.
optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
side = Side(weights=None if args.no_weights else model.state_dict)


def train(epoch):
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        side.step(images=len(data))


for epoch in range(args.epochs):
    train(epoch)
if hvd.rank() == 0:
    print(f"trained for {args.epochs} epochs")
