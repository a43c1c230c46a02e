"""Run a training script, unmodified, so that it takes turns with what it is compared with.

    python benchmarks/harness/take_turns.py --socket PATH --side NAME --warm-up 3 -- SCRIPT ...

Started by the benchmarks, under the script's own launcher, once for each rank. Of the trainers it
catches the end of each pass through the loop of training, `Recorder.restart_clock`: whatever a step
entails, be it a line of the record or a checkpoint, is inside a turn. Other scripts call
`benchmarks.harness.turns.step_ended` themselves.
"""

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import turns


def main() -> None:
    """Connect to the benchmark, then be the script."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/harness/take_turns.py", description=__doc__
    )
    add = parser.add_argument
    add("--socket", required=True, metavar="PATH", help="where the benchmark listens")
    add("--side", required=True, metavar="NAME", help="which side of it this process belongs to")
    add("--copy", type=int, default=0, metavar="N", help="which of several alike on that side")
    add("--warm-up", type=int, required=True, metavar="STEPS", help="before the first turn")
    add("--overruns", action="store_true", help="go on after a turn until told to hold")
    add("--without-instruments", action="store_true", help="record nothing, measure nothing")
    add("program", nargs=argparse.REMAINDER, help="-- the script and its arguments")
    options = parser.parse_args()
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    turns.CLIENT = turns.Client(
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
    from recipe.record.recorder import Recorder

    restart_clock = Recorder.restart_clock

    def end_step(recorder: Recorder) -> None:
        turns.step_ended()
        restart_clock(recorder)

    replace(Recorder, restart_clock=end_step)


def replace(owner: Any, **attributes: Any) -> None:
    """Set attributes of a class or a module."""
    for name, value in attributes.items():
        setattr(owner, name, value)


def take_instruments_out() -> None:
    """Leave of the Recorder nothing that takes time: no clocks, energy, files, TensorBoard, console
    and stop file; nor the metrics of the training batches."""
    import torch

    import recipe.training.metrics
    from recipe.record.recorder import Recorder

    def nothing(*_: Any, **__: Any) -> None:
        return None

    names = ("_open", "begin", "start_clock", "lap", "trace", "step")
    replace(
        Recorder,
        **dict.fromkeys(names, nothing),
        restart_clock=lambda recorder: turns.step_ended(),
        pending_sums=lambda recorder: torch.zeros(1, 4),
        write_steps=lambda recorder, sums: False,
    )
    no_sums: dict[torch.device, torch.Tensor] = {}

    def batch_sums(outputs: torch.Tensor, *_: Any) -> torch.Tensor:
        if outputs.device not in no_sums:
            no_sums[outputs.device] = torch.zeros(4, dtype=torch.float64, device=outputs.device)
        return no_sums[outputs.device]

    # Before the trainer takes it from there.
    replace(recipe.training.metrics, batch_sums=batch_sums)


if __name__ == "__main__":
    main()
