"""Arguments of lab 02's experiments, looked at before the first rank starts. Left out: what a launch itself refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real


def whole(name: str, value: object, example: int, least: int = 1, most: int | None = None) -> None:
    """Raises ValueError for anything but a whole number from `least` up (to `most`). example: one that would do."""
    good = isinstance(value, Integral) and not isinstance(value, bool)
    if not good or value < least or (most is not None and value > most):
        reach = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} is a whole number, {reach}, not {value!r}; {name}={example} would do")


def seconds(name: str, value: object, example: float, zero: bool = False) -> None:
    """Raises ValueError for anything but a finite number of seconds above 0, or from 0 up with zero=True."""
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero):
        reach = "0 or more" if zero else "more than 0"
        raise ValueError(f"{name} is in seconds, {reach}, not {value!r}; {name}={example:g} would do")


def yes_or_no(name: str, value: object) -> None:
    """Raises ValueError for anything but True and False, such as the text that `strong=false` on a command line is."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is True or False, not {value!r}")


def cut(batch: int, world_sizes: Sequence[int]) -> None:
    """Raises ValueError for a batch whose rows cannot be shared out evenly to each of these numbers of ranks."""
    for n in world_sizes:
        if batch % n:
            each = math.lcm(*world_sizes)
            found, sizes = -(-batch // each) * each, ", ".join(map(str, world_sizes))
            raise ValueError(
                f"with strong=True the ranks share one batch: a batch of {batch} rows cannot be cut for {n} ranks; "
                f"batch={found} would do for {sizes}"
            )
