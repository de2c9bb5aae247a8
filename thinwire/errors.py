"""Errors a user can meet. Each message is one sentence: the field, its value, what is allowed."""

from __future__ import annotations


class UsageError(ValueError):
    """A setting or call that thinwire cannot accept."""


class WireError(RuntimeError):
    """A payload that does not decode: wrong length, version, count or an index out of range."""


class ExchangeError(RuntimeError):
    """A collective failed or the ranks disagree about what to exchange."""


class DamageError(ExchangeError):
    """A message arrived with other bits than it was sent with; every rank raises this, and none has used the message."""


class JobError(RuntimeError):
    """A job whose workers failed; the message says which, why and where the traceback is."""


class Interrupted(JobError):
    """A job that its user has stopped; the message says how to go on."""
