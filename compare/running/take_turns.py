"""A trainer of this project as a side: runs inside each process that trains.

    python compare/running/take_turns.py TRAINER ...

runs the trainer, unmodified, under its own launcher, once for each rank. It calls the trainer's
`main` with `Hooks`; everything that a step entails, such as a line of the record or a checkpoint,
is inside a turn. How turns work stands in compare/for_scripts/comparison_side.py, by which other
scripts report the end of a step themselves.
"""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from compare.for_scripts.comparison_side import SCHEDULER, Client, join
from recipe.world import read_world

# Time-outs that keep running while a side is paused: they must never expire. Horovod's background
# threads on Gloo wait for each other all the time; torch's monitor of its NCCL watchdog thread
# aborts after 480 s by default.
NEVER_S = "1000000"
WITHOUT_TIMEOUTS = {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": NEVER_S,
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": NEVER_S,
}
ENDLESS_IMAGES = 1 << 22  # length of an epoch, so that no epoch ends in a turn


class TrainerClient(Client):
    """A trainer's turns. They have images, phases and, if `digest` is set, the digest of the
    trained weights; without `exchange` the gradients are not exchanged. A trainer tells about its
    environment in its record, unless it is a side like a script (benchmarks/programs/trainer.py),
    which then gives a digest after the warm-up, too."""

    gives_facts = digest = False
    exchange = True
    session: Any = None
    model: Any = None

    def __init__(self, agent: Connection, warm_up: int) -> None:
        super().__init__(agent, warm_up)
        self.samples, self.laps = 0, list[Any]()

    def trained(self, session: Any, model: Any = None) -> None:
        """Count a step of this session; `model` if each rank holds all of it."""
        self.session, self.model = session, model
        before, self.samples = self.samples, session.progress.samples_seen
        self.laps += session.meter.clock.ended
        self.step_ended("images", (self.samples - before) / read_world().size)

    def begin(self) -> None:
        self.laps = []
        super().begin()

    def measured(self) -> dict[str, Any]:
        """Add the phases of the mean step, and the digest of the weights."""
        values = super().measured()
        if self.steps > 0:  # 0: in a warm-up of one step
            phases = self.session.meter.clock.seconds(self.laps)
            values["phases"] = {name: seconds / self.steps for name, seconds in phases.items()}
        if self.digest and self.model is not None:
            from recipe.record.fingerprint import weights_sha256  # loads torch

            values["weights"] = weights_sha256(self.model, buffers=False)
        return values


CLIENT: TrainerClient | None = None


def step_ended(session: Any, model: Any = None) -> None:
    """Report that an optimizer step has ended; do nothing outside a comparison."""
    if CLIENT is not None:
        CLIENT.trained(session, model)


def exchanges() -> bool:
    """Return whether this turn's steps exchange gradients."""
    return CLIENT is None or CLIENT.exchange


def join_if_measured() -> None:
    """Take part in a comparison, if there is one."""
    global CLIENT
    if SCHEDULER in os.environ:
        CLIENT = TrainerClient(*join())


def main() -> None:
    """Join the comparison before anything large is loaded, then run the trainer."""
    join_if_measured()
    os.environ.update(WITHOUT_TIMEOUTS)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parents[1])
    train(sys.argv[0])


def train(path: str) -> None:
    """Run the trainer at this path, and count its steps.

    All steps have a batch of --batch-size. The trainer goes on past --max-steps, no epoch ends in a
    turn, and none is slowed by a profile or a trace. Its clocks do not count the time in which it
    waits.

    stall_timeout=0 also keeps torch from aborting. Its NCCL watchdog looks every 0.1 s, and checks
    the age of an exchange before it checks whether the exchange has ended, which may have been just
    before a pause.
    """
    from recipe.start import Hooks, run_script  # loads what a rank's agent must not hold

    hooks = Hooks(step_ended, exchanges, ENDLESS_IMAGES)
    run_script(
        path,
        hooks=hooks,
        max_steps=None,
        batch_size_warmup_epochs=0,
        stall_timeout=0,
        profile_steps=None,
        tensor_steps=None,
    )


if __name__ == "__main__":
    from compare.running import take_turns  # the module that scripts import, not __main__

    take_turns.main()
