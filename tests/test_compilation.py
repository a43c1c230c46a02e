"""--compile: the parts of a network, in what order their gradients come, and what is compiled when.

The tests in one process run the parts by torch's own kernels (aot_eager), those that launch the
trainers by Inductor's.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
import torch.distributed as dist
from launching import SMALL, run
from making import CPU, a_config
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recipe.record.probes import GradientTimes
from recipe.training import compilation
from recipe.training.compilation import compile_network
from recipe.training.metrics import evaluate, means
from recipe.training.model import build_ema, build_model

Graphs = list[torch.fx.GraphModule]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """What is compiled, in this order. Torch's settings are its own at first, and afterwards."""
    compiled: Graphs = []
    by_torch = torch._dynamo.lookup_backend("aot_eager")

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return by_torch(graph, inputs)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: note)
    with torch._dynamo.config.patch(
        optimize_ddp=True,
        recompile_limit=8,
        accumulated_recompile_limit=256,
        fail_on_recompile_limit_hit=True,
    ):
        yield compiled


def a_network(arch: str = "resnet18", workers: int = 2, **settings: Any) -> nn.Module:
    """A network of 10 classes, compiled for this many workers; for 0 it is not compiled."""
    model = build_model(a_config(arch=arch, **settings), 10, download=False)
    if workers:
        compile_network(model, workers)
    return model


def images(number: int = 2, size: int = 32) -> torch.Tensor:
    return torch.rand(number, 3, size, size, generator=torch.Generator().manual_seed(number))


def events_of_backward(model: nn.Module, loss: torch.Tensor) -> list[list[str]]:
    """Pass backward; the weights whose gradients came after the start of each part's backward pass
    and before that of the next."""
    came: list[list[str]] = []
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CompiledFunctionBackward":
            node.register_prehook(lambda _: came.append([]))
        nodes += [following for following, _ in node.next_functions]
    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: came[-1].append(name))
    loss.backward()
    return came


def test_gradients_come_part_by_part(graphs: Graphs) -> None:
    model = a_network()
    came = events_of_backward(model, model(images()).sum())
    assert len(came) == len(graphs) == 3
    names = [name for part in came for name in part]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert "fc.weight" in came[0] and "conv1.weight" in came[-1]
    for names in came[1:-1]:
        assert sum(model.get_parameter(name).nbytes for name in names) < 2 * compilation.PART_BYTES
    assert not torch._dynamo.utils.counters["graph_break"]


def test_one_worker_compiles_the_network_as_a_whole(graphs: Graphs) -> None:
    model = a_network(workers=1)
    assert len(events_of_backward(model, model(images()).sum())) == len(graphs) == 1


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_ddp_compiles_the_graphs_that_horovod_compiles(graphs: Graphs) -> None:
    """Under DDP torch would cut them once more."""
    codes = []
    wraps: list[Callable[[nn.Module], nn.Module]] = [
        lambda model: model,
        partial(DistributedDataParallel, bucket_cap_mb=4),
    ]
    for wrap in wraps:
        torch._dynamo.reset()
        graphs.clear()
        network = wrap(a_network())
        for _ in range(2):  # DDP settles its buckets in the first step
            network(images()).sum().backward()
        codes.append([graph.code for graph in graphs])
    assert codes[0] == codes[1] and len(codes[0]) == 3


def trained(model: nn.Module, steps: int = 3, batches_per_step: int = 1) -> dict[str, Any]:
    """The state after a few steps of SGD, each on several batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        for batch in range(batches_per_step):
            loss = model(images(3 + step + batch)).square().mean()
            (loss / batches_per_step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("batches_per_step", [1, 2])
@pytest.mark.usefixtures("graphs")
def test_a_compiled_network_learns_what_an_eager_one_does(
    workers: int, batches_per_step: int
) -> None:
    eager, compiled = (
        trained(a_network("resnet10", workers=number), batches_per_step=batches_per_step)
        for number in (0, workers)
    )
    assert list(compiled) == list(eager)
    for name, values in eager.items():
        assert torch.allclose(compiled[name], values, rtol=1e-3, atol=1e-5), name


@pytest.mark.usefixtures("graphs")
def test_eager_and_compiled_networks_load_each_others_weights() -> None:
    eager, compiled = a_network("resnet10", workers=0), a_network("resnet10", seed=7)
    compiled.load_state_dict(eager.state_dict())
    first, second = eager(images()), compiled(images())
    assert torch.allclose(first, second, atol=1e-5)
    trained(compiled)
    eager.load_state_dict(compiled.state_dict())
    with torch.no_grad():
        assert torch.allclose(eager.eval()(images()), compiled.eval()(images()), atol=1e-5)


def validation(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of uint8 images."""
    return [
        ((255 * images(number)).to(torch.uint8), torch.zeros(number, dtype=torch.int64))
        for number in sizes
    ]


@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_copies_share_what_is_compiled(precision: str, graphs: Graphs) -> None:
    """A moving average, O2's fp16 network and the networks of `--wire-format auto`: each is called
    with its own weights."""
    config = a_config(arch="resnet10", model_ema=True, precision=precision)
    model = a_network("resnet10")
    ema = build_ema(model, config)
    assert ema is not None
    with torch.no_grad():
        for weight in ema.module.parameters():
            weight.zero_()
    batches = validation(4, 4, 3)
    first = evaluate(model, batches, config, CPU)
    seen = len(graphs)
    assert seen > 0
    for _ in range(2):
        assert torch.equal(evaluate(model, batches, config, CPU), first)
        assert torch.equal(evaluate(copy.deepcopy(model), batches, config, CPU), first)
        of_average = evaluate(ema, batches, config, CPU)
        assert means(of_average)["loss"] == pytest.approx(math.log(10))  # all classes alike
    assert len(graphs) == seen


def test_evaluation_is_that_of_an_eager_network(graphs: Graphs) -> None:
    """Also of the last batch, which is smaller."""
    config, batches = a_config(), validation(4, 4, 3)
    eager, compiled = (
        evaluate(a_network("resnet10", workers=workers), batches, config, CPU) for workers in (0, 2)
    )
    assert torch.allclose(eager, compiled, atol=1e-4) and graphs


def test_each_size_is_compiled_once(graphs: Graphs) -> None:
    """More sizes than torch's limit, from which on it would compile nothing more."""
    model = a_network("resnet10")
    sizes = [(2 + number % 3, 32 + 4 * (number // 3)) for number in range(12)]
    counts = []
    for number, size in sizes * 2:
        model(images(number, size)).sum().backward()
        counts.append(len(graphs))
    assert counts[:12] == [2 * number for number in range(1, 13)] and counts[-1] == counts[11]
    kinds = [node.meta["example_value"] for graph in graphs for node in graph.graph.nodes
             if node.op == "placeholder"]  # fmt: skip
    assert not any(isinstance(value, torch.SymInt) for value in kinds), "symbolic sizes"


def test_the_watch_expects_that_compiling_takes_long(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = []
    monkeypatch.setattr(compilation, "expect_delay", lambda: announced.append(len(graphs)))
    model = a_network("resnet10")
    for size in (32, 40, 32):
        model(images(size=size))
    assert announced == [0, 2]


def test_hooks_of_the_whole_network_are_not_compiled(graphs: Graphs) -> None:
    """They may count, as what elastic training keeps of BatchNorm does, or read a clock, as a
    profile does."""
    model, calls = a_network("resnet10"), list[int]()
    model.register_forward_hook(lambda *_: calls.append(len(calls)))
    times = GradientTimes(model)
    for _ in range(3):
        model(images()).sum().backward()
        times.end_step(counts=True)
    assert calls == [0, 1, 2] and len(graphs) == 2 and len(times.steps) == 3
    for step in times.steps:
        assert min(step["ready"].values()) > step["backward"]


COMPILED = f"{SMALL} --arch resnet10 --max-steps 6 --epochs 1 --compile"


@pytest.mark.launch
@pytest.mark.full
def test_both_engines_compiled_compute_the_same(tmp_path: Path) -> None:
    """By Inductor: losses, gradients, weights and buffers are bit-equal."""
    pytest.importorskip("horovod", reason=needs.HOROVOD)
    words = f"--workers 2 --steps 3 --out {tmp_path} -- {COMPILED}"
    told = run([sys.executable, "compare/parity.py", *words.split()]).checked().output
    assert "Result: bit-equal" in told
