"""Errors a user can meet. Each message is one sentence: the field, its value, what is allowed."""

from __future__ import annotations


class UsageError(ValueError):
    """A setting or call that thinwire cannot accept."""


class WireError(RuntimeError):
    """A payload that does not decode: wrong length, version, count or an index out of range."""


class ExchangeError(RuntimeError):
    """A collective failed or the ranks disagree about what to exchange."""


class JobError(RuntimeError):
    """A job whose workers failed; the message says which, why and where the traceback is."""
