"""What `train.py` shows: progress, the losses on disk, and the loss curve."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

# --- progress ---------------------------------------------------------------------------------


class Reporter(Protocol):
    """Shows how a run is getting on."""

    def step(self, step: int, loss: float) -> None:
        """Show one step; `float.hex` shows every bit of the loss."""

    def say(self, text: str) -> None:
        """Show one line."""


class PlainReporter:
    """Whole lines, flushed: what a log file or a pipe wants."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def step(self, step: int, loss: float) -> None:
        self.say(f"step {step}/{self._steps}  loss {loss:.4f}  {loss.hex()}")

    def say(self, text: str) -> None:
        print(text, flush=True)


class BarReporter(PlainReporter):
    """The same lines above a progress bar."""

    def __init__(self, steps: int, done: int) -> None:
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

        super().__init__(steps)
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns)
        self._task = self.bar.add_task("training", total=steps, completed=done)

    def step(self, step: int, loss: float) -> None:
        super().step(step, loss)
        self.bar.update(self._task, completed=step, description=f"loss {loss:.4f}")

    def say(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, markup=False)


@contextmanager
def reporter(steps: int, *, done: int) -> Iterator[Reporter]:
    """Report with a progress bar on a terminal, in plain lines elsewhere."""
    if not sys.stdout.isatty():
        yield PlainReporter(steps)
        return
    report = BarReporter(steps, done)
    with report.bar:
        report.bar.console.show_cursor()  # a run that is killed could not bring it back
        yield report


# --- the losses -------------------------------------------------------------------------------


class History:
    """The losses of a run, one JSON line per step on disk: they survive what kills the run."""

    def __init__(self, path: Path) -> None:
        """Read what is there; a line without an end was being written when the run died."""
        self._path = path
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        self._records = [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def losses(self) -> dict[int, float]:
        """The loss of every step."""
        return {item["step"]: item["loss"] for item in self._records if "loss" in item}

    @property
    def resumed(self) -> list[int]:
        """The steps of the checkpoints that the run was resumed from."""
        return [item["step"] for item in self._records if "resumed" in item]

    def rewind(self, step: int) -> None:
        """Begin (`step` 0) or resume: forget the steps after `step`, which are run again."""
        self._records = [item for item in self._records if item["step"] <= step]
        if step:
            self._records.append({"step": step, "resumed": True})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rewritten = self._path.with_suffix(".new")
        rewritten.write_text("".join(json.dumps(item) + "\n" for item in self._records))
        rewritten.replace(self._path)

    def append(self, step: int, loss: float) -> None:
        """Record one step."""
        self._records.append({"step": step, "loss": loss})
        with self._path.open("a") as file:
            file.write(json.dumps(self._records[-1]) + "\n")


# --- the loss curve ---------------------------------------------------------------------------


def plot_losses(path: Path, runs: Mapping[str, History]) -> None:
    """Draw a PNG of the losses of some runs, with the points where they were resumed marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for index, (name, history) in enumerate(runs.items()):
        losses = history.losses
        marks = [step for step in history.resumed if step in losses]
        # The first line is the broadest, so that an equal one drawn over it hides nothing.
        width, colour = 1.5 + 3.0 * (len(runs) - 1 - index), f"C{index}"
        axes.plot(list(losses), list(losses.values()), colour, linewidth=width, label=name)
        for step in marks:
            axes.axvline(step, color=colour, linestyle=":", linewidth=1)
        if marks:
            heights = [losses[step] for step in marks]
            axes.plot(marks, heights, "o", color=colour, label="resumed here")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
