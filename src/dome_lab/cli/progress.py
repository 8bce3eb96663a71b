"""Progress bars: what is being done, how much of it, and the time left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich import progress
from rich.text import Text

from dome_lab import interrupts
from dome_lab.cli.screen import console

if TYPE_CHECKING:
    from dome_lab.paper.cost import TimeLeft
    from dome_lab.paper.jobs import Event


class _TimeLeft(progress.TimeRemainingColumn):
    """By the bar's own speed; what was expected, as long as it has none."""

    def __init__(self, expected: float) -> None:
        super().__init__(elapsed_when_finished=True)
        self._expected = expected

    def render(self, task: progress.Task) -> Text:
        if task.time_remaining is None:
            return Text(_clock(self._expected), style="progress.remaining")
        return super().render(task)


def simple_bar(expected: float, *, transient: bool = False) -> progress.Progress:
    """A bar that soon knows its own speed.

    Args:
        expected: Seconds, until then.
        transient: It leaves no trace.
    """
    return _bar(_TimeLeft(expected), transient)


def followed(events: Iterable[Event], time_left: TimeLeft) -> Iterator[Event]:
    """Pass events on, and show beside them how far the work is."""
    from dome_lab.paper.cost import share_of_row

    with _bar(progress.TextColumn("[cyan]{task.fields[left]}")) as bar:
        task = bar.add_task("starting", total=1.0, left=_clock(time_left.seconds))
        for event in events:
            interrupts.check()
            job, row = event.job, event.row
            share = share_of_row(job.key)
            time_left.add_new(job.key)
            if event.elsewhere:
                bar.update(task, description=f"waiting: {event.elsewhere}")
                continue
            if row is None:
                time_left.finish(job.key, event.seconds)
                where = "over"
            else:
                time_left.advance(job.key, event.seconds, share)
                where = f"epoch {row.get('epoch')}/{job.run.epochs}"
            if share or row is None:  # not for each of a thousand eigenvalues
                bar.update(
                    task,
                    description=f"{job.figure.partition('_')[0]} {where}, {job.run}",
                    completed=time_left.share_done,
                    left=_clock(time_left.seconds),
                )
            yield event
        bar.update(task, description="done", completed=1.0, left=_clock(0.0))


def _bar(
    time_column: progress.ProgressColumn, transient: bool = False
) -> progress.Progress:
    return progress.Progress(
        progress.BarColumn(bar_width=24),
        progress.TaskProgressColumn(),
        time_column,
        progress.TextColumn("{task.description}", markup=False),
        console=console,
        transient=transient,
        # Away from a terminal rich would leave an empty line of it.
        disable=transient and not console.is_terminal,
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
