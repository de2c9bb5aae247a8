"""The `thinwire` command: one table of commands, each imported only when it is used. What --help lists is that table.

Whatever goes wrong is said in one sentence on stderr. The exit code is 2 for what was typed wrong, 1 for a job that failed.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from thinwire.errors import Interrupted, JobError, UsageError
from thinwire.version import __version__

SLOGAN = "Fast data-parallel PyTorch training on networks slower than the gradients."
EXAMPLE = "thinwire compare digits --workers 4 --methods dense,topk,adtopk --density 0.01"
HELP = frozenset({"-h", "--help"})
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
REFUSALS = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR,
        errno.ENOTDIR, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO,
    }
)  # fmt: skip
"""What a disk or a folder says, which is no fault of the program."""


class Command(NamedTuple):
    """`function` in `module`; a CONTEXT_SETTINGS there is passed on to the parser."""

    name: str
    """As it is typed; two words for a command of a group."""
    module: str
    summary: str
    extra: str = "train"
    """Which of thinwire's extras brings what it imports."""
    needs: tuple[str, ...] = ("numpy",)
    """What it imports of that extra."""

    @property
    def function(self) -> str:
        return self.name.replace(" ", "_")


GROUPS = {
    "bench": "Measure: a training step, compression, exchanges, selections, wire formats.",
    "analyse": "Look into what a method does while a recipe trains.",
}
"""First words that several commands share."""

TRAIN = ("train", ("numpy", "sklearn", "matplotlib"))
LAB = ("lab", ("pyroute2",))
COMMANDS = (
    Command("train", "recipes.command", "Train a task once, with compressed gradients.", *TRAIN),
    Command("compare", "recipes.command", "Train a task once with each method, and compare.", *TRAIN),
    Command("report", "report.command", "Write a page about one run, or compare several.", "cli", ("typer", "rich")),
    Command("analyse convergence", "analyse.command", "Compare what workers select with what their mean would.", *TRAIN),
    Command("launch", "tools.launch_command", "Write a launch file for your own script on a cluster.", "cli", ("typer", "rich")),
    Command("lab", "lab.command", "Run a command on an emulated cluster on this machine.", *LAB),
    Command("plan", "bench.plan_command", "Predict a step on any link, and say what to use."),
    Command("bench step", "bench.step_command", "Time a training step under each method."),
    Command("bench compress", "bench.compress_command", "Time encoding and decoding a whole gradient."),
    Command("bench exchange", "bench.exchange", "Time and count what the exchanges send."),
    Command("bench lowrank", "bench.lowrank_command", "Time what low-rank methods send."),
    Command("bench select", "bench.select", "What the selections keep, how exactly, and how fast."),
    Command("bench wire", "bench.wire", "Bits per entry of every wire format."),
)  # fmt: skip
"""A new command adds its line here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = typed_command(given)
    try:
        code = run(given, name)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads it, such as `head`, has seen enough; nothing is left to be written when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except UsageError as error:
        complain(name, str(error))
        return EXIT_USAGE
    except JobError as error:
        complain(name, str(error))
        return EXIT_INTERRUPTED if isinstance(error, Interrupted) else EXIT_FAILED
    except OSError as error:
        if error.filename is None or error.errno not in REFUSALS:
            raise
        complain(name, f"'{error.filename}' cannot be used ({error.strerror})")
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
    first = arguments[0] if arguments else "--help"
    if first == "--version":
        print(f"thinwire {__version__}")
        return 0
    if name is None and first not in HELP:
        raise UsageError(f"there is no option {first}; thinwire --help lists what there is")
    if name is None or (name in GROUPS and set(arguments[1:]) <= HELP):
        print(overview(name))
        return 0
    return parse(find_command(name), arguments)


def overview(group: str | None = None) -> str:
    """What there is, from the table alone: it needs neither torch nor an extra."""
    shown = [entry for entry in COMMANDS if group in (None, entry.name.split()[0])]
    width = max(len(entry.name) for entry in shown)
    about = GROUPS[group] if group else f"{SLOGAN}\n\n  {EXAMPLE}"
    lines = [f"Usage: thinwire {group or 'COMMAND'} [OPTIONS]", "", about, "", "Commands:"]
    lines += [f"  {entry.name:{width}}  {entry.summary}" for entry in shown]
    options = [
        ("--version", "Show the version."),
        ("-h, --help", "Show this; after a command its options."),
    ]
    return "\n".join([*lines, "", "Options:", *(f"  {o:{width}}  {text}" for o, text in options)])


def find_command(name: str) -> Command:
    found = next((entry for entry in COMMANDS if entry.name == name), None)
    if found is None:
        *group, wrong = name.split()
        known = {
            entry.name.split()[len(group)] for entry in COMMANDS if entry.name.split()[:-1] == group
        }
        known |= set() if group else set(GROUPS)
        path = " ".join(["thinwire", *group])
        raise UsageError(f"there is no command {wrong}; {suggest(wrong, sorted(known), path)}")
    return found


def build_command(entry: Command) -> Any:
    """The parser of one command, which is imported here."""
    check_extra(entry.extra, ("typer", "rich", *entry.needs))
    import typer

    module = importlib.import_module(f"thinwire.{entry.module}")
    settings = {"help_option_names": ["-h", "--help"], **getattr(module, "CONTEXT_SETTINGS", {})}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(entry.name, context_settings=settings)(getattr(module, entry.function))
    return typer.main.get_command(app)


def parse(entry: Command, arguments: list[str]) -> int:
    """Read the options of one command, and run it."""
    command = build_command(entry)
    import typer

    # The class above all of the parser's complaints; which package it lives in depends on typer's version.
    parser_complaint: Any = typer.BadParameter.__mro__[2]
    try:
        result = command.main(
            args=arguments[len(entry.name.split()) :],
            prog_name=f"thinwire {entry.name}",
            standalone_mode=False,
            # What was typed, for commands that write it down for others to run.
            obj=list(arguments),
        )
    except typer.Abort:
        return EXIT_INTERRUPTED
    except parser_complaint as error:
        raise UsageError(explain(error, arguments)) from None
    return result if isinstance(result, int) else 0


def check_extra(extra: str, needs: Sequence[str]) -> None:
    """Refuse with everything that is missing; every extra of a command brings the parser along."""
    missing = [module for module in dict.fromkeys(needs) if find_spec(module) is None]
    if missing:
        *others, last = missing
        named = f"{', '.join(others)} and {last}" if others else last
        raise UsageError(
            f"{named} cannot be found; install what is missing with pip install 'thinwire[{extra}]'"
        )


def explain(complaint: Any, arguments: Sequence[str]) -> str:
    """The parser's complaint as one sentence, with the nearest option or command if a name is wrong."""
    text = " ".join(complaint.format_message().split()).rstrip(".")
    context: Any = getattr(complaint, "ctx", None)
    if text.startswith("No such option"):
        wrong = complaint.option_name
        known = [name for option in context.command.params for name in option.opts]
        return f"there is no option {wrong}; {suggest(wrong, known, context.command_path)}"
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
