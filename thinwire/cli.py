"""The `thinwire` command: one table of commands, each imported only when it is used.

What a user types wrong is answered with one sentence on stderr and exit code 2; a job that fails with one sentence
and exit code 1.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from thinwire.errors import JobError, UsageError
from thinwire.version import __version__

if TYPE_CHECKING:
    import typer

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """`function` in `module`; a CONTEXT_SETTINGS there is passed on to the parser."""

    name: str
    """As it is typed; two words for a command of a group."""
    module: str
    summary: str
    extra: str
    """Which of thinwire's extras brings what it imports."""
    needs: tuple[str, ...]
    """What it imports of that extra."""

    @property
    def function(self) -> str:
        return self.name.replace(" ", "_")


GROUPS = {
    "bench": "Measure: a training step, compression, an exchange, selections, wire formats.",
    "analyse": "Look into what a method does while a recipe trains.",
}
"""First words that several commands share."""

COMMANDS = (
    Command(
        "train",
        "thinwire.recipes.command",
        "Train a task once, with compressed gradients.",
        extra="train",
        needs=("numpy", "sklearn", "matplotlib"),
    ),
    Command(
        "compare",
        "thinwire.recipes.command",
        "Train a task once with each method, from the same seed, and compare.",
        extra="train",
        needs=("numpy", "sklearn", "matplotlib"),
    ),
    Command(
        "analyse convergence",
        "thinwire.analyse.command",
        "Measure the constant xi and the rows that get nothing, epoch by epoch.",
        extra="train",
        needs=("numpy", "sklearn", "matplotlib"),
    ),
    Command(
        "lab",
        "thinwire.lab.command",
        "Run a command on an emulated cluster: hosts on this machine, joined by slow links.",
        extra="lab",
        needs=("pyroute2",),
    ),
    Command(
        "bench step",
        "thinwire.bench.step_command",
        "Time a training step under each method, next to torch's own hooks.",
        extra="train",
        needs=("numpy",),
    ),
    Command(
        "bench compress",
        "thinwire.bench.compress_command",
        "Time encoding and decoding a whole gradient, against one pass over memory.",
        extra="train",
        needs=("numpy",),
    ),
    Command(
        "bench exchange",
        "thinwire.bench.exchange",
        "Time and count what the exchanges send, for real or on virtual ranks.",
        extra="train",
        needs=("numpy",),
    ),
    Command(
        "bench select",
        "thinwire.bench.select",
        "What the selections keep, how exactly, and how fast.",
        extra="train",
        needs=("numpy",),
    ),
    Command(
        "bench wire",
        "thinwire.bench.wire",
        "Bits per entry of every wire format, against the entropy.",
        extra="train",
        needs=("numpy",),
    ),
)
"""A new command adds its entry here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = typed_command(given)
    try:
        code = run(given, name)
    except UsageError as error:
        complain(name, str(error))
        return EXIT_USAGE
    except JobError as error:
        complain(name, str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        complain(name, "interrupted")
    return code


def typed_command(arguments: Sequence[str]) -> str | None:
    """The command's name: the first word, or the first two where the first is a group."""
    words = [word for word in arguments[:2] if not word.startswith("-")]
    if not words or arguments[0] != words[0]:
        return None
    return " ".join(words) if words[0] in GROUPS else words[0]


def run(arguments: list[str], name: str | None) -> int:
    check_extra("cli", ("typer", "rich"))
    import typer

    app = build_app(name)
    # The class above all of the parser's complaints; which package it lives in depends on typer's version.
    parser_complaint: Any = typer.BadParameter.__mro__[2]
    command = typer.main.get_command(app)
    try:
        result = command.main(
            args=arguments or ["--help"],
            prog_name="thinwire",
            standalone_mode=False,
            # What was typed, for commands that write it down for others to run.
            obj=list(arguments),
        )
    except typer.Abort:
        return EXIT_INTERRUPTED
    except parser_complaint as error:
        raise UsageError(explain(error, arguments)) from None
    return result if isinstance(result, int) else 0


def build_app(name: str | None) -> typer.Typer:
    """The parser; only the command called `name` is imported, the others are there for --help."""
    import typer

    app = typer.Typer(
        help="Fast data-parallel PyTorch training on networks slower than the gradients.\n\n"
        "thinwire compare digits --workers 4 --methods dense,topk,adtopk --density 0.01",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"thinwire {__version__}")
            raise typer.Exit

    version_flag = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Show the version."
    )

    @app.callback()
    def thinwire(version: bool = version_flag) -> None:
        pass

    groups = {word: typer.Typer(help=summary) for word, summary in GROUPS.items()}
    for word, group in groups.items():
        app.add_typer(group, name=word, no_args_is_help=True)
    for entry in COMMANDS:
        first, _, second = entry.name.partition(" ")
        parser, word = (groups[first], second) if second else (app, first)
        if entry.name == name:
            check_extra(entry.extra, entry.needs)
            module = importlib.import_module(entry.module)
            settings = getattr(module, "CONTEXT_SETTINGS", None)
            parser.command(word, context_settings=settings)(getattr(module, entry.function))
        else:
            parser.command(word, help=entry.summary)(lambda: None)
    return app


def check_extra(extra: str, needs: Sequence[str]) -> None:
    missing = [module for module in needs if find_spec(module) is None]
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} cannot be found; install what is missing with "
            f"pip install 'thinwire[{extra}]'"
        )


def explain(complaint: Any, arguments: Sequence[str]) -> str:
    """The parser's complaint as one sentence, with the nearest option or command if a name is wrong."""
    text = " ".join(complaint.format_message().split()).rstrip(".")
    context: Any = getattr(complaint, "ctx", None)
    if text.startswith("No such option"):
        wrong = complaint.option_name
        known = [name for option in context.command.params for name in option.opts]
        return f"there is no option {wrong}; {suggest(wrong, known, context.command_path)}"
    if text.startswith("No such command"):
        wrong = text.split("'")[1]
        path = context.command_path if context else "thinwire"
        known = list(context.command.commands) if context else [c.name for c in COMMANDS]
        return f"there is no command {wrong}; {suggest(wrong, known, path)}"
    given = find_value(getattr(complaint, "param", None), arguments)
    if given is not None:
        option, value = given
        return (
            f"{option} is {value!r}, which is not possible: {lower(complaint.message).rstrip('.')}"
        )
    path = context.command_path if context else "thinwire"
    return f"{lower(text)}; {path} --help shows how to use it"


def suggest(wrong: str, known: Sequence[str], path: str) -> str:
    near = difflib.get_close_matches(wrong, known, n=1)
    return f"did you mean {near[0]}?" if near else f"{path} --help lists what there is"


def find_value(parameter: Any, arguments: Sequence[str]) -> tuple[str, str] | None:
    """An option as it was typed: its name and its value."""
    for option in getattr(parameter, "opts", ()):
        for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
            if word == option:
                return option, following
            if word.startswith(f"{option}="):
                return option, word.partition("=")[2]
    return None


def lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def complain(name: str | None, sentence: str) -> None:
    print(f"thinwire {name}: {sentence}" if name else f"thinwire: {sentence}", file=sys.stderr)
