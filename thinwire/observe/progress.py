"""Progress: what a user sees while a job runs. Bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as Remaining

from thinwire.observe.metrics import Record

LINES_PER_RUN = 10


class RunState:
    """Where one run stands."""

    def __init__(self, name: str, steps: int) -> None:
        self.name = name
        self.steps = steps
        self.step = 0
        self.loss: float | None = None
        self.score: float | None = None

    def update(self, record: Record) -> None:
        self.step = record["step"]
        self.loss = record.get("loss", self.loss)
        self.score = record.get("score", self.score)

    def describe(self) -> str:
        loss = "" if self.loss is None else f"loss {self.loss:.4f}"
        score = "" if self.score is None else f"test {self.score:.1%}"
        return f"{loss:<12} {score:<11}"


class JobProgress(ABC):
    """Takes the records of metrics.jsonl as they come; a context manager."""

    def __init__(self) -> None:
        self._runs: dict[str, RunState] = {}

    def show(self, record: Record) -> None:
        if record["event"] == "start":
            run = self._runs[record["run"]] = RunState(record["run"], record["steps"])
            self.begin(run)
        else:
            run = self._runs[record["run"]]
            run.update(record)
            self.advance(run, record["event"])

    @abstractmethod
    def begin(self, run: RunState) -> None: ...

    @abstractmethod
    def advance(self, run: RunState, event: str) -> None: ...

    def __enter__(self) -> JobProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def begin(self, run: RunState) -> None:
        self._bars[run.name] = self._progress.add_task(run.name, total=run.steps, state="")

    def advance(self, run: RunState, event: str) -> None:
        bar = self._bars[run.name]
        self._progress.update(bar, completed=run.step, state=run.describe())

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

    def begin(self, run: RunState) -> None:
        self._said[run.name] = 0
        self._say(f"{run.name}: {run.steps} steps")

    def advance(self, run: RunState, event: str) -> None:
        part = run.step * LINES_PER_RUN // run.steps
        # After a test, so that its score is in the line.
        if event == "test" and part > self._said[run.name]:
            self._said[run.name] = part
            self._say(f"{run.name}: step {run.step}/{run.steps} {run.describe()}".rstrip())

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


def make_progress(console: Console) -> JobProgress:
    return Bars(console) if console.is_terminal else Lines(console)
