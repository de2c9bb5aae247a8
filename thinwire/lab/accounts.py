"""Accounts: who COMMAND runs as. A lab needs root, but what runs inside it does not."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.errors import UsageError


@dataclass(frozen=True)
class Account:
    """A user of this machine who is not root."""

    uid: int
    gid: int
    environment: Mapping[str, str]
    """What names the user and the user's home."""


def invoking_user() -> Account | None:
    """Who called sudo; None if nobody did, or if it was root."""
    if os.geteuid() != 0 or "SUDO_UID" not in os.environ:
        return None
    uid, gid = (_number(name) for name in ("SUDO_UID", "SUDO_GID"))
    if uid == 0:
        return None
    try:
        known = pwd.getpwuid(uid)
    except KeyError:
        return Account(uid, gid, {})
    environment = {"USER": known.pw_name, "LOGNAME": known.pw_name, "HOME": known.pw_dir}
    return Account(uid, gid, environment)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r}; it must be the number that sudo sets")
    return int(text)
