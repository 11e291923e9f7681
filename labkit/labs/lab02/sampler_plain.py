"""An answer to exercise 2.4 as plain numbers, worked out in the rank, or what stands there instead, in words.

Lists, tuples and arrays of any kind of whole number are as good as lists of ints, any real number as a float. Nothing
is gone through that is longer than any right answer. Left out: whether the numbers are right (`sampler_told`).
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from labkit.check.compare import kind

MOST = 10_000  # steps, and indices in a step: the questions have some hundred samples
LARGEST = 10**18  # of an index
TOO_MANY, TOO_LARGE, WHOLE = "as many as", "an index beyond", "whole numbers"


def answer(found: Any) -> Any:
    """Steps as [([int, ...], float), ...]. What is no list of steps, or no step, comes as a text."""
    if type(found) not in (list, tuple):
        return kind(found)
    if len(found) > MOST:
        return f"{TOO_MANY} {len(found)} steps"
    return [_step(step) for step in found]


def _step(step: Any) -> Any:
    if not isinstance(step, (list, tuple)) or len(step) != 2:
        return f"{_count(step)} {WHOLE}" if _is_whole(step) else kind(step)
    if _is_whole(step):
        return f"2 {WHOLE}"
    indices, weight = step
    what = f"({kind(indices)}, {kind(weight)})"
    whole = _indices(indices)
    if type(whole) is str:
        return whole or what
    if not isinstance(weight, numbers.Real) or isinstance(weight, bool):
        return what
    try:
        return whole, float(weight)
    except OverflowError:
        return whole, float("inf")


def _indices(indices: Any) -> list[int] | str:
    """As ints; a text where they are too many or too large, "" where they are no whole numbers."""
    import operator

    if not _is_row(indices):
        return ""
    count = _count(indices)
    if count > MOST:
        return f"{TOO_MANY} {count} indices in a step"
    try:
        whole = [operator.index(each) for each in indices]
    except TypeError:
        return ""
    return f"{TOO_LARGE} 10**18" if any(abs(each) > LARGEST for each in whole) else whole


def _is_row(found: Any) -> bool:
    """Whether it is a row of things that are no tensors."""
    import numpy as np

    if isinstance(found, (str, bytes)) or not isinstance(found, (Sequence, np.ndarray)):
        return False
    if isinstance(found, np.ndarray):
        return found.ndim == 1
    return type(found) is range or _count(found) > MOST or not any(hasattr(each, "layout") for each in found)


def _count(row: Any) -> int:
    try:
        return len(row)
    except OverflowError:  # of a range
        return LARGEST


def _is_whole(found: Any) -> bool:
    return _is_row(found) and type(_indices(found)) is list
