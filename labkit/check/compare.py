"""Compare what ranks returned with what was expected, in the parent.

Written on numpy arrays and plain Python alone: `torch.allclose`, `torch.equal` and a tensor's own `==` are
what a learner's session may have replaced, and a subclass of Tensor could answer for itself. Left out:
comparing gradients or modules; take their tensors out first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Difference:
    """The first place where two values part.

    stage is "shape" or "values"; where is "" or e.g. "[2]['loss']".
    """

    stage: str
    where: str
    got: str
    expected: str


def difference(got: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0, where: str = "") -> Difference | None:
    """The first difference of two values, or None when they are the same.

    Handles tensors and arrays (dtype and shape must be equal; |got - expected| <= atol + rtol |expected|,
    and nan equals nan), numbers, strings, None, and lists, tuples and dicts of those. A list and a tuple of
    the same items are the same; True and 1 are not.
    """
    if _is_array(expected):
        return _array_difference(got, expected, rtol, atol, where)
    if isinstance(expected, Mapping):
        if not isinstance(got, dict) or list(map(repr, got)) != list(map(repr, expected)):
            return Difference("shape", where, kind(got), f"a dict with the keys {', '.join(map(repr, expected))}")
        keys = list(expected)
    elif isinstance(expected, (list, tuple)):
        if type(got) not in (list, tuple) or len(got) != len(expected):
            return Difference("shape", where, kind(got), kind(expected))
        keys = list(range(len(expected)))
    else:
        return _plain_difference(got, expected, rtol, atol, where)
    for key in keys:
        found = difference(got[key], expected[key], rtol, atol, f"{where}[{key!r}]")
        if found is not None:
            return found
    return None


def kind(value: Any) -> str:
    """What a value is, in words: "a float32 tensor of shape (3, 4)", "a list of 3", "None"."""
    if value is None or value is NotImplemented:
        return str(value)
    if _is_array(value):
        name = type(value).__name__
        noun = {"ndarray": "array", "Tensor": "tensor"}.get(name, name)  # a subclass by its own name
        dtype = str(value.dtype).removeprefix("torch.")
        held = "" if _has_values(value) else ", which holds no values (device meta)"
        return f"{_article(dtype)} {dtype} {noun} of shape {tuple(value.shape)}{held}"
    name = type(value).__name__
    if isinstance(value, (list, tuple, dict)):
        return f"a {name} of {len(value)}"
    return f"{_article(name)} {name}"


def same_on_all(results: Sequence[Any], rtol: float = 0.0, atol: float = 0.0) -> tuple[int, Difference] | None:
    """The first rank whose result differs from rank 0's, and how; None when all are the same."""
    for rank, result in enumerate(results):
        found = difference(result, results[0], rtol, atol)
        if found is not None:
            return rank, found
    return None


def _article(noun: str) -> str:
    return "an" if noun[:1].lower() in "aeiou" else "a"


def _is_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _has_values(value: Any) -> bool:
    return isinstance(value, np.ndarray) or value.device.type != "meta"


def _array_difference(got: Any, expected: Any, rtol: float, atol: float, where: str) -> Difference | None:
    # A subclass brings its own methods, so only the very type counts.
    if type(got) is not type(expected) or got.dtype != expected.dtype or tuple(got.shape) != tuple(expected.shape):
        return Difference("shape", where, kind(got), kind(expected))
    if not _has_values(got):
        return Difference("shape", where, kind(got), kind(expected))
    mine, theirs = _numpy(got), _numpy(expected)
    with np.errstate(all="ignore"):
        equal = (mine == theirs) | ((mine != mine) & (theirs != theirs))
        if rtol or atol:
            equal |= np.abs(mine - theirs) <= atol + rtol * np.abs(theirs)
    if equal.all():
        return None
    at = tuple(int(i) for i in np.argwhere(~equal)[0])
    if mine.size <= 8:
        return Difference("values", where, str(mine.tolist()), str(theirs.tolist()))
    count = int((~equal).sum())
    return Difference(
        "values",
        f"{where}[{', '.join(map(str, at))}]" if at else where,
        f"{mine[at]} ({count} of {mine.size} elements differ)",
        f"{theirs[at]}",
    )


def _numpy(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    value = value.detach().cpu()
    try:
        return value.numpy()
    except TypeError:  # bfloat16 and other types that numpy does not have; float32 holds them exactly
        return value.float().numpy()


def _plain_difference(got: Any, expected: Any, rtol: float, atol: float, where: str) -> Difference | None:
    loose = isinstance(expected, float) and type(got) in (int, float)
    if not loose and type(got) is not type(expected):
        return Difference("shape", where, kind(got), kind(expected))
    if got == expected or (got != got and expected != expected):
        return None
    if loose and abs(got - expected) <= atol + rtol * abs(expected):
        return None
    return Difference("values", where, repr(got), repr(expected))
