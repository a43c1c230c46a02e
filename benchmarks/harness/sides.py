"""The trainers as sides of a benchmark, and the work that they and bare loops are given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compare.plan.configurations import CONFIGURATIONS
from compare.plan.plan import TRAINERS
from compare.running.sides import Side

# Of several workers, if nothing else is asked for: names in compare's table.
CONFIGURED_AS = {"ddp": "ddp-torchrun", "horovod": "horovod-mpi"}


@dataclass(frozen=True)
class Workload:
    """What is trained: enough to give a trainer and a bare loop the same work."""

    arch: str
    image_size: int
    batch_size: int  # per worker
    flags: tuple[str, ...] = ()  # that trainers and bare_loop.py share
    threads: int | None = 1  # per worker; None: the trainer's own choice

    def words(self) -> list[str]:
        """Flags that trainers and bare_loop.py share."""
        words = ["--arch", self.arch, "--train-crop-size", str(self.image_size)]
        words += ["--batch-size", str(self.batch_size), *self.flags]
        return words if self.threads is None else [*words, "--threads", str(self.threads)]

    def __str__(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} thread"
        flags = f", {' '.join(self.flags)}" if self.flags else ""
        return f"{self.arch} at {self.image_size} pixels, batch {self.batch_size}{threads}{flags}"


STEPS_OF_AN_EPOCH = 20_000  # more than a benchmark makes: no evaluation comes in between


def trainer_side(
    name: str,
    engine: str,
    workload: Workload,
    steps: int,
    workers: int = 1,
    copies: int = 1,
    flags: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    data: str = "synthetic",
    configuration: str = "",
    **others: Any,
) -> Side:
    """A trainer as a side: `engine` is "ddp" or "horovod"; one worker is started by python, several
    as `configuration` of compare's table."""
    launcher = ["python"]
    if workers > 1:
        chosen = CONFIGURATIONS[configuration or CONFIGURED_AS[engine]]
        launcher, flags = chosen.launch_words(workers, None), (*chosen.arguments, *flags)
    program = [TRAINERS[engine], "--data", data, *workload.words()]
    program += ["--val-crop-size", str(workload.image_size), "--epochs", "1000"]
    if data == "synthetic":
        images = workload.batch_size * workers * STEPS_OF_AN_EPOCH
        program += ["--synthetic-images", str(images)]
    if "--checkpoint-steps" not in flags:
        program += ["--keep-checkpoints", "0"]
    program += ["--log-dir", "{folder}", "--name", "run", *flags]
    return Side(
        name=name,
        launcher=tuple(launcher),
        program=tuple(program),
        images_per_step=workload.batch_size * workers,
        steps=steps,
        ranks=workers,
        copies=copies,
        environment=environment or {},
        **others,
    )
