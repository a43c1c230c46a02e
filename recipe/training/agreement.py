"""Whether the ranks train the same thing: asked before the first step, and at each checkpoint.

Each rank lists its own disk, reads its own command line and runs its own installation. Where these
differ, training looks normal for hours and is worth nothing, or hangs. So the ranks exchange
digests of all that decides what is computed, and if they differ, the values themselves.
"""

import hashlib
import json
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from recipe.data.batches import Data
from recipe.errors import UserError
from recipe.ranks import Ranks
from recipe.settings.config import Config
from recipe.settings.flags import FLAGS, spelled
from recipe.watch import heartbeat

PACKAGES = ("torch", "torchvision", "horovod", "numpy", "pillow", "simplejpeg")
ROOT = Path(__file__).parents[2]
MOST_FIELDS = 4  # in a message
BITS = {torch.float32: torch.int32, torch.float16: torch.int16}


def comparison_keys(
    engine: str, config: Config, data: Data, device: torch.device
) -> dict[str, str]:
    """All that the ranks must share to train the same thing: a name, as messages call it, and a
    value that can be printed."""
    facts = {"type of device": device.type, "Python": platform.python_version()}
    for package in PACKAGES:
        if engine == package or package != "horovod":
            facts[f"{package}'s version"] = metadata.version(package)
    if config.uses_timm:
        facts["timm's version"] = metadata.version("timm")
    for name, value in asdict(config).items():
        if FLAGS[name].per_rank == "first":
            facts[spelled(name)] = "given" if value else "not given"
        elif FLAGS[name].per_rank == "equal":
            facts[spelled(name)] = str(value)
    facts["training images"], facts["validation images"] = str(data.num_train), str(data.num_val)
    for name, listing in {"training": data.train, "validation": data.val}.items():
        facts[f"{name} data"] = "files" if listing is not None else "synthetic"
        if listing is not None:
            facts[f"names of the {name} images"] = _digest(listing.paths.tobytes())
            facts[f"labels of the {name} images"] = _digest(listing.labels.tobytes())
            facts["number of classes"] = str(len(listing.classes))
            facts["names of the classes"] = _digest(
                "\0".join(listing.classes).encode(errors="surrogateescape")
            )
    own = f"{engine}_train"
    for folder in ("recipe", own if (ROOT / own).is_dir() else "baselines"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            facts[f"the source {file.relative_to(ROOT)}"] = _digest(file.read_bytes())
    return facts


def _digest(content: bytes) -> str:
    return "digest " + hashlib.sha256(content).hexdigest()[:12]


def check_same_training(facts: dict[str, str], device: torch.device, ranks: Ranks) -> None:
    """Raise UserError, on all ranks alike, if their `facts` differ or if two have one GPU.

    In the CPU's memory, so that it works where one rank found no GPU.
    """
    is_cuda = device.type == "cuda"
    gpu = str(torch.cuda.get_device_properties(device).uuid) if is_cuda else ""
    rows = ranks.gather([_digest(json.dumps(facts).encode()), gpu])
    heartbeat()  # all ranks have met: from now on none may be late
    if len({digest for digest, _ in rows}) > 1:
        hosts = ranks.gather(ranks.world.host)
        raise UserError(differences(ranks.gather(facts), hosts))
    gpus = [gpu for _, gpu in rows if gpu]
    if len(set(gpus)) < len(gpus):
        second = next(rank for rank, gpu in enumerate(gpus) if gpu in gpus[:rank])
        host = ranks.gather(ranks.world.host)[second]
        raise UserError(
            f"ranks {gpus.index(gpus[second])} and {second} on {host} have the same GPU: start at "
            "most as many ranks on a host as it has GPUs, show each rank another one "
            "(CUDA_VISIBLE_DEVICES), or pass --no-cuda to train on the CPU"
        )


def check_same_weights(model: nn.Module, step: int, ranks: Ranks) -> None:
    """Raise UserError, on all ranks alike, if their weights differ: an engine, a library or a
    machine is at fault then. BatchNorm's statistics may be each rank's own.

    A sum over the bits of each parameter, taken where it lies: one pass over the memory, while a
    cryptographic digest would copy all from the GPU first. (The end of a run has one.)
    """
    sums = [
        weight.detach().contiguous().view(-1).view(BITS[weight.dtype]).sum(dtype=torch.int64)
        for weight in model.parameters()
    ]
    together = torch.stack([one.to(sums[0].device) for one in sums])  # of a network on two GPUs
    digests = ranks.gather(_digest(together.cpu().numpy().tobytes()))
    if len(set(digests)) > 1:
        hosts = ranks.gather(ranks.world.host)
        columns = zip(*ranks.gather(together.tolist()), strict=True)
        names = (name for name, _ in model.named_parameters())
        differ = [name for name, column in zip(names, columns, strict=True) if len(set(column)) > 1]
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise UserError(
            f"after step {step} the ranks hold different weights in {differ[0]}{more}: "
            f"{_groups(digests, hosts)}. "
            "A machine, a library or the engine computes wrongly: check it. No checkpoint of this "
            "step is kept: --resume auto goes on from the one before"
        )


def differences(facts: list[dict[str, str]], hosts: list[str]) -> str:
    """The message for ranks whose `facts` differ: which do, and who has which value."""
    names = dict.fromkeys(name for rank in facts for name in rank)
    told = [
        f"{name}: {_groups(values, hosts)}"
        for name in names
        if len(set(values := [rank.get(name, "missing") for rank in facts])) > 1
    ]
    more = f"; and {len(told) - MOST_FIELDS} more" if len(told) > MOST_FIELDS else ""
    return (
        f"the ranks would not train the same thing: {'; '.join(told[:MOST_FIELDS])}{more}. Start "
        "all ranks by one command, and give all hosts the same data, sources and packages"
    )


def _groups(values: list[str], hosts: list[str]) -> str:
    """Who has which of `values` (one a rank): those of most ranks first, of equally many those of
    the lowest rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank {first} ({hosts[first]})" + (f" and {len(others)} more" if others else "")
        for value, (first, *others) in sorted(ranks.items(), key=lambda item: -len(item[1]))
    )
