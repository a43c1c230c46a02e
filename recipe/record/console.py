"""What rank 0 prints during a run: progress bars in a terminal, and elsewhere, as in a batch job's
log, a line now and then."""

import sys
import time

from tqdm import tqdm

from recipe.data.batches import Data
from recipe.settings.config import Config
from recipe.training.state import Progress

LINE_S = 30.0  # between two lines, at least


class Console:
    """The lines and progress bars of one session."""

    def __init__(self, config: Config, data: Data, progress: Progress) -> None:
        self.config, self.data, self.progress = config, data, progress
        self.has_bars = sys.stderr.isatty()
        self.bar = self.evaluation = tqdm(disable=True)  # none
        self.latest = ""  # figures of the last written steps
        self.evaluated, self.said_at = 0, time.monotonic()

    def say(self, line: str) -> None:
        """Print a line, above the bars."""
        tqdm.write(line) if self.has_bars else print(line, flush=True)
        self.said_at = time.monotonic()

    def begin_training(self, last_step: int) -> None:
        """Start to show steps, up to `last_step`."""
        self.began, self.began_after = time.monotonic(), self.progress.step
        self.last_step = last_step
        self.bar = tqdm(
            total=last_step,
            initial=self.progress.step,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            dynamic_ncols=True,
            leave=False,
            disable=not self.has_bars or last_step == self.progress.step,
        )

    def end_step(self) -> None:
        """Show that a step has ended, after it was counted."""
        is_due = time.monotonic() - self.said_at >= LINE_S
        if self.bar.disable and not is_due:
            return
        step, epoch = self.progress.step, self.progress.samples_seen // self.data.num_train
        place = f"epoch {min(epoch + 1, self.config.epochs):>3}/{self.config.epochs}"
        # This includes everything between steps, such as evaluations and checkpoints.
        step_s = (time.monotonic() - self.began) / (step - self.began_after)
        left = f"{tqdm.format_interval(step_s * (self.last_step - step))} left{self.latest}"
        if not self.bar.disable:
            self.bar.set_description_str(place, refresh=False)
            self.bar.set_postfix_str(left, refresh=False)
            self.bar.update()
        else:
            self.say(f"{place}  step {step:,}/{self.last_step:,}, {left}")

    def show_evaluation(self, images: int) -> None:
        """Show that about so many more `images` were evaluated, by all ranks together."""
        total = self.data.num_val * (1 + self.config.model_ema)
        images = min(images, total - self.evaluated)
        self.evaluated += images
        if self.has_bars:
            if self.evaluation.disable:
                self.evaluation = tqdm(
                    total=total, desc="evaluating", unit=" images", dynamic_ncols=True, leave=False
                )
            self.evaluation.update(images)
        elif time.monotonic() - self.said_at >= LINE_S:
            self.say(f"evaluating: {self.evaluated:,} of {total:,} images")

    def end_evaluation(self) -> None:
        """Remove the evaluation's bar."""
        self.evaluation.close()
        self.evaluated = 0

    def close(self) -> None:
        """Remove all bars: nothing more is shown."""
        self.end_evaluation()
        self.bar.close()
