"""Forms: how a part says what it computes, so that a fast path can be found for it without knowing its class."""

from __future__ import annotations

from typing import Any, ClassVar

from thinwire.described import Described


class Formed(Described):
    """A part with a `form`: the name of what it computes, or None if only its own code knows.

    Backends register the forms they can do (`thinwire.compress.backends`). A subclass that replaces one of the methods
    in `computed_by` computes something else, so it has no form, unless it names one itself.
    """

    form: ClassVar[str | None] = None
    computed_by: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "form" not in vars(cls) and any(name in vars(cls) for name in cls.computed_by):
            cls.form = None
