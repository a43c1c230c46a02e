"""A training as PyTorch's ImageNet example has it, for test_side.py: DDP under torchrun."""

import argparse

import torch
import torch.distributed as dist
from comparison_side import Side
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class FakeData(Dataset):
    """Random images, the same for whoever asks for the same number."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=generator), index % 10


def train(loader, network, criterion, optimizer, side):
    network.train()
    for images, target in loader:
        output = network(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        side.step(images=len(images))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)
    )
    network = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), args.lr, momentum=0.9)
    data = FakeData()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    side = Side(weights=network.state_dict)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(loader, network, criterion, optimizer, side)
    if dist.get_rank() == 0:
        print(f"trained for {args.epochs} epochs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
