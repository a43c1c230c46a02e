"""What the ranks of a training exchange besides gradients: figures, digests, weights."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipe.world import World

Collective = Callable[[torch.Tensor], torch.Tensor]


def unchanged(values: torch.Tensor) -> torch.Tensor:
    """Do what any collective does in a world of one process: return the values unchanged."""
    return values


@dataclass(frozen=True)
class Ranks:
    """This rank's place, and the engine's collectives, which all ranks must call together. By
    default those of a single process."""

    world: World
    sum: Collective = unchanged  # the sum of the ranks' values, in the memory where they are
    from_first: Collective = unchanged  # rank 0's values

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return every rank's `values` [n], by rank: [world.size, n]."""
        table = values.new_zeros(self.world.size, len(values))
        table[self.world.rank] = values
        return self.sum(table)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank. A value is anything that JSON can hold, of any
        size; tuples come back as lists."""
        text = torch.tensor(list(json.dumps(value).encode()))  # int64: Horovod cannot sum bytes
        sizes = self.rows(torch.tensor([len(text)])).flatten().tolist()
        padded = nn.functional.pad(text, (0, max(sizes) - len(text)))
        rows = self.rows(padded).tolist()
        return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]
