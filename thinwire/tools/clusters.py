"""`--print-launch`: a command of thinwire on a cluster, instead of a run on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from thinwire.errors import UsageError
from thinwire.tools.hosts import read_hosts
from thinwire.tools.launch_files import launch_file
from thinwire.tools.settings.kinds import File

DROPPED = ("--print-launch", "--hosts", "--interface", "--workers", "--ranks")
"""Options that are for the script and not in it: under torchrun the number of workers is torchrun's."""


@dataclass(frozen=True, kw_only=True)
class ClusterScript:
    """A script that runs the command on a cluster, instead of a run on this machine."""

    print_launch: Annotated[str | None, "slurm|pbs|torchrun"] = None
    """Only print a script that runs this on a cluster; torchrun goes by ssh."""
    hosts: File | None = None
    """With --print-launch: a line per machine, NAME [slots=N]."""
    interface: str | None = None
    """With --print-launch: the network interface to use, such as eth0."""

    def __post_init__(self) -> None:
        for field in ("hosts", "interface"):
            value = getattr(self, field)
            if value is not None and not self.wanted:
                raise UsageError(f"{field} is {str(value)!r}, which goes only with --print-launch")

    @property
    def wanted(self) -> bool:
        return self.print_launch is not None

    def show(self, typed: Sequence[str], per_host: int) -> None:
        """Print the script for a command line as the user typed it, --print-launch and all."""
        assert self.print_launch is not None
        arguments = drop_options(typed)
        words = [word for word in arguments[:2] if not word.startswith("-")]
        script = launch_file(
            self.print_launch,
            ["-m", "thinwire", *arguments],
            name="-".join(["thinwire", *words]),
            hosts=read_hosts(self.hosts) if self.hosts is not None else [],
            interface=self.interface,
            per_host=per_host,
        )
        print(script, end="")


def drop_options(typed: Sequence[str]) -> list[str]:
    """A command line without the options that are for the script."""
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        if word in DROPPED:
            next(words, None)
        elif word.partition("=")[0] not in DROPPED:
            kept.append(word)
    return kept
