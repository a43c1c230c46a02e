"""Run a training script, unmodified, so that it takes turns with what it is compared with.

    python compare/running/take_turns.py --socket PATH --side NAME --warm-up 3 -- SCRIPT ...

Started under the script's own launcher, once for each rank. The trainers call
`recipe.record.meter.AT_STEP_END` at the end of each step: whatever it entails, be it a line of the
record or a checkpoint, is inside a turn. Other scripts call
`compare.running.turn_client.step_ended` themselves.
"""

import argparse
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare.running import turn_client


def main() -> None:
    """Connect to who measures, then be the script."""
    parser = argparse.ArgumentParser(
        prog="python compare/running/take_turns.py", description=__doc__
    )
    add = parser.add_argument
    add("--socket", required=True, metavar="PATH", help="where who measures listens")
    add("--side", required=True, metavar="NAME", help="which side of it this process belongs to")
    add("--copy", type=int, default=0, metavar="N", help="which of several alike on that side")
    add("--warm-up", type=int, required=True, metavar="STEPS", help="before the first turn")
    add("--overruns", action="store_true", help="go on after a turn until told to hold")
    add("--without-instruments", action="store_true", help="record nothing, measure nothing")
    add("program", nargs=argparse.REMAINDER, help="-- the script and its arguments")
    options = parser.parse_args()
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    turn_client.CLIENT = turn_client.Client(
        options.socket, options.side, options.copy, options.warm_up, options.overruns
    )
    if Path(program[0]).name == "train.py":
        catch_steps()
        if options.without_instruments:
            take_instruments_out()
    sys.argv = program
    sys.path[0] = str(Path(program[0]).resolve().parent)  # as `python SCRIPT` has it
    runpy.run_path(program[0], run_name="__main__")


def catch_steps() -> None:
    """Have the trainer's steps counted; the waiting stays out of its own clocks."""
    from recipe.record import meter

    meter.AT_STEP_END.append(lambda step: turn_client.step_ended())


class Nothing:
    """Stands in for what records and measures: whatever is asked of it, it does nothing."""

    input, train_seconds = None, 0.0

    def __init__(self, *_: Any) -> None:
        self.energy = self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None

    def restart(self) -> None:
        """The meter's last call in the loop of training: the end of a step."""
        turn_client.step_ended()


def take_instruments_out() -> None:
    """Leave of the trainer nothing that takes time beside training: no clocks, energy, files,
    TensorBoard and console; nor the metrics of the training batches."""
    import torch

    from recipe.record import meter, recorder
    from recipe.training import metrics

    no_sums: dict[torch.device, torch.Tensor] = {}

    def batch_sums(outputs: torch.Tensor, *_: Any) -> torch.Tensor:
        if outputs.device not in no_sums:
            no_sums[outputs.device] = torch.zeros(4, dtype=torch.float64, device=outputs.device)
        return no_sums[outputs.device]

    # Before the trainer takes them from there.
    parts: list[tuple[Any, str, Any]] = [
        (recorder, "Recorder", Nothing),
        (meter, "StepMeter", Nothing),
        (metrics, "batch_sums", batch_sums),
    ]
    for module, name, substitute in parts:
        setattr(module, name, substitute)


if __name__ == "__main__":
    main()
