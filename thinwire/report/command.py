"""`thinwire report`: the command line of the report pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.errors import UsageError
from thinwire.report.build import REPORT_FILE, build_report
from thinwire.tools.files import write_text
from thinwire.tools.settings.options import DryRun

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Folders of train, compare, bench step or plan --out."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Where the page goes; RUN/report.html, and report.html here for several runs.",
        show_default=False,
    ),
]


def report(runs: Runs, out: Out = None, dry_run: DryRun = False) -> None:
    """Write one page about a run, or about several side by side.

    thinwire report runs/compare-digits runs/train-digits --out both.html

    The page holds all it shows and can be read without a network.
    """
    path = out or (runs[0] / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE))
    if dry_run:
        typer.echo(f"{path} would be about {', '.join(map(str, runs))}")
        return
    for folder in runs:
        if not folder.is_dir():
            raise UsageError(f"run is '{folder}', which is no folder")
    write_text(path, build_report(runs))
    typer.echo(f"page: {path}")
