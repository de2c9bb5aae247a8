"""Progress: what a user sees while a job runs. Bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as Remaining

from thinwire.tools.metrics import Record
from thinwire.tools.scores import format_score
from thinwire.tools.tables import say

LINES_PER_RUN = 10
WIDE = 120
"""Columns of a terminal in which a bar has room for everything."""


class RunState:
    """Where one run stands."""

    def __init__(self, start: Record) -> None:
        self.name: str = start["run"]
        self.steps: int = start["steps"]
        self.step: int = start["step"]
        self.metric: str = start["metric"]
        self.loss: float | None = None
        self.score: float | None = None
        self._steps_per_epoch: int = start["steps_per_epoch"]
        self._examples: int = start["examples_per_step"]
        self._last: Record = {}

    def update(self, record: Record) -> None:
        self.step = record["step"]
        self.loss = record.get("loss", self.loss)
        self.score = record.get("score", self.score)
        if record["event"] == "step":
            self._last = record

    def is_worth_a_line(self, event: str) -> bool:
        """After a test, so that its score is in the line, unless tests are too rare."""
        rare = self._steps_per_epoch * LINES_PER_RUN > self.steps
        test_follows = self.step % self._steps_per_epoch == 0 or self.step == self.steps
        return event == "test" or (rare and not test_follows)

    def describe(self) -> str:
        return f"{self.describe_result()} {self.describe_step()}"

    def describe_result(self) -> str:
        loss = "" if self.loss is None else f"loss {self.loss:.4f}"
        score = "" if self.score is None else f"test {format_score(self.metric, self.score)}"
        return f"{loss:<12} {score:<11}"

    def describe_step(self) -> str:
        """Throughput of all workers, and what the last step sent and waited."""
        if not self._last:
            return ""
        speed = 1000 * self._examples / max(self._last["ms"], 1e-3)
        sent = f"{speed:,.0f} examples/s, {self._last['wire_bytes'] / 1e6:.4f} MB sent"
        exposed = self._last.get("exposed_ms")
        return sent if exposed is None else f"{sent}, {exposed:.1f} ms exposed"


class JobProgress(ABC):
    """Takes the records of metrics.jsonl as they come; a context manager."""

    def __init__(self) -> None:
        self._runs: dict[str, RunState] = {}

    def show(self, record: Record) -> None:
        if record["event"] == "start":
            run = self._runs[record["run"]] = RunState(record)
            self.begin(run)
        elif record["event"] == "note":
            self.say(f"{record['run']}: {record['sentence']}")
        else:
            run = self._runs[record["run"]]
            run.update(record)
            self.advance(run, record["event"])

    @abstractmethod
    def say(self, sentence: str) -> None: ...

    @abstractmethod
    def begin(self, run: RunState) -> None: ...

    @abstractmethod
    def advance(self, run: RunState, event: str) -> None: ...

    def __enter__(self) -> JobProgress:
        return self

    def __exit__(self, *raised: object) -> None:
        return None


class Bars(JobProgress):
    """One bar per run, redrawn in place."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            Remaining(elapsed_when_finished=True),
            console=console,
        )

    def say(self, sentence: str) -> None:
        say(self._progress.console, sentence)

    def begin(self, run: RunState) -> None:
        self._bars[run.name] = self._progress.add_task(
            run.name, total=run.steps, completed=run.step, state=""
        )

    def advance(self, run: RunState, event: str) -> None:
        wide = self._progress.console.width >= WIDE
        state = run.describe() if wide else run.describe_result()
        self._progress.update(self._bars[run.name], completed=run.step, state=state)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()


class Lines(JobProgress):
    """A line now and then, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._said: dict[str, int] = {}

    def say(self, sentence: str) -> None:
        say(self._console, sentence)
        self._console.file.flush()

    def begin(self, run: RunState) -> None:
        self._said[run.name] = run.step * LINES_PER_RUN // run.steps
        resumed = f", {run.step} of them done" if run.step else ""
        self.say(f"{run.name}: {run.steps} steps{resumed}")

    def advance(self, run: RunState, event: str) -> None:
        part = run.step * LINES_PER_RUN // run.steps
        if part > self._said[run.name] and run.is_worth_a_line(event):
            self._said[run.name] = part
            self.say(f"{run.name}: step {run.step}/{run.steps} {run.describe()}".rstrip())


def make_progress(console: Console) -> JobProgress:
    return Bars(console) if console.is_terminal else Lines(console)
