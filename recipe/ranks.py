"""What the ranks of a training tell each other, besides gradients: figures, digests, weights."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipe.world import World

Collective = Callable[[torch.Tensor], torch.Tensor]


def unchanged(values: torch.Tensor) -> torch.Tensor:
    """Any collective of a process alone."""
    return values


@dataclass(frozen=True)
class Ranks:
    """This rank's place among the others, and the engine's collectives, which all ranks are to call
    together. By default those of a process alone."""

    world: World
    sum: Collective = unchanged  # the ranks' values added up, in the memory where they are
    from_first: Collective = unchanged  # rank 0's values

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's `values` [n], by rank: [world.size, n]."""
        own = values.new_zeros(self.world.size, len(values))
        own[self.world.rank] = values
        return self.sum(own)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank: what JSON can hold, of any size; tuples come back as
        lists."""
        text = torch.tensor(list(json.dumps(value).encode()))  # int64: Horovod adds no bytes
        sizes = self.rows(torch.tensor([len(text)])).flatten().tolist()
        padded = nn.functional.pad(text, (0, max(sizes) - len(text)))
        rows = self.rows(padded).tolist()
        return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]
