"""A learner's function or class as bytes: it can be sent to ranks, and is not called in the parent.

A check seals the answer first and draws its seed afterwards, so the code that runs cannot depend on the seed. Left
out: reading an answer's source for grading; it is kept for the learner only.
"""

from __future__ import annotations

import inspect
import linecache
import os
import pickle
import re
import types
from collections.abc import Callable
from typing import Any

from labkit.check.stubs import is_stub

__all__ = ["Sealed", "fresh_seed", "is_stub", "seal", "source_of"]


class Sealed:
    """Picklable stand-in: unpickled in a rank it becomes the function or class itself."""

    def __init__(self, payload: bytes, name: str):
        self.payload = payload
        self.__name__ = name

    def __reduce__(self) -> tuple:
        return pickle.loads, (self.payload,)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"{self.__name__} is sealed: it runs in ranks, through observe(), not in the parent")


def seal(fn: Callable) -> Sealed:
    """Pickle a function or a class now, by value if it was written in a notebook.

    Raises LaunchError naming what cannot be sent.
    """
    from labkit.ranks.sending import pack_function

    return Sealed(pack_function(fn), getattr(fn, "__name__", "the answer"))


def fresh_seed() -> int:
    """A new seed from the system; LABKIT_SEED, a whole number, makes it the same each time.

    Raises ValueError when LABKIT_SEED is something else.
    """
    wanted = os.environ.get("LABKIT_SEED")
    if not wanted:
        return int.from_bytes(os.urandom(6), "big")
    try:
        return int(wanted)
    except ValueError:
        raise ValueError(f"LABKIT_SEED is {wanted!r}; it is a whole number") from None


def source_of(answer: Callable) -> str:
    """The source of a function or a class, or "" where Python does not know it."""
    try:
        return inspect.getsource(answer)
    except (OSError, TypeError):  # of a class from a notebook, inspect does not know where it stands
        return _source_of_class(answer) if isinstance(answer, type) else ""


def _source_of_class(cls: type) -> str:
    """From the cell that its first method stands in: the last `class NAME` before that method, to the block's end."""
    codes = [value.__code__ for value in vars(cls).values() if isinstance(value, types.FunctionType)]
    if not codes:
        return ""
    lines = linecache.getlines(codes[0].co_filename)
    for begin in range(min(codes[0].co_firstlineno, len(lines)) - 1, -1, -1):
        if re.match(rf"\s*class\s+{re.escape(cls.__name__)}\b", lines[begin]):
            return "".join(inspect.getblock(lines[begin:]))
    return ""
