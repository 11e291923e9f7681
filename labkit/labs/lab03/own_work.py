"""Whether an answer calls labkit's own cost model, or torch's ready-made part, for what it is asked to work out.

A courtesy: it reads the names in the code, of the answer and of the notebook's functions that it names, opens partials,
and looks at base classes. Left out: a determined author, who can hide a name; what grades rest on is a rerun in a
sandbox.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.check.exercise import Verdict, wrong

ROOMS = ("labkit.cost", "labkit.labs", "labkit.record")


def borrowed(fn: Any, more: Sequence[str] = ()) -> str:
    """Runs in a rank: the first name in fn's code that stands for a part of labkit's cost model; "" for none.

    more: full names of other things that would do the exercise's work ("torch.amp").
    """
    rooms, seen, fn = (*ROOMS, *more), set(), _opened(fn)
    waiting = [fn]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name, value in _named(one):
            found = _full_name(value) if value is not None else name
            if any(found == room or found.startswith(f"{room}.") for room in rooms):
                return found
            if isinstance(value, types.FunctionType | type) and _full_name(value).startswith(f"{_home(fn)}."):
                waiting.append(value)
    return ""


def verdict(found: str, tried: str) -> Verdict:
    """Cause "ready_made"."""
    sentence = f"{found} does what is asked for here: write it yourself."
    return wrong("evidence", "ready_made", sentence, tried, found, "an answer of your own")


def _home(fn: Any) -> str:
    return getattr(fn, "__module__", "") or ""


def _opened(value: Any) -> Any:
    """What a functools.partial calls."""
    while isinstance(value, functools.partial):
        value = value.func
    return value


def _named(thing: Any) -> Iterator[tuple[str, Any]]:
    """(name, value or None) of the thing itself, of its base classes, and of all that its code names."""
    for each in thing.__mro__ if isinstance(thing, type) else (thing,):
        yield getattr(each, "__name__", ""), each
    for code, space in _codes(thing):
        for name in _names(code):
            yield name, _value(space, name)


def _codes(thing: Any) -> Iterator[tuple[types.CodeType, Mapping[str, Any]]]:
    """Code objects of a function, or of a class's methods, each with its globals and the names around it."""
    members = vars(thing).values() if isinstance(thing, type) else (thing,)
    for each in members:
        each = getattr(each, "__func__", getattr(each, "fget", each))
        if isinstance(each, types.FunctionType):
            yield each.__code__, ChainMap(_closure(each), each.__globals__)


def _closure(fn: types.FunctionType) -> dict[str, Any]:
    """Names of functions around this one that it reads, with their values; a cell may still be empty."""
    found = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def _names(code: types.CodeType, around: Mapping[str, str] | None = None) -> Iterator[str]:
    """Names that code reads of its module or imports, and what it reads of them: `torch.amp` gives "torch" and that.

    "from labkit import cost" gives "labkit" and "labkit.cost". Attributes of anything else are none of them:
    `self.states` has nothing to do with a `states` that the notebook imported. around: what functions around this one
    have imported, by their names for it.
    """
    yield from code.co_freevars
    imported = last = chain = ""
    bound = dict(around or {})
    for each in dis.get_instructions(code):
        if each.opname in ("IMPORT_NAME", "IMPORT_FROM"):
            imported = each.argval if each.opname == "IMPORT_NAME" else imported
            last = imported if each.opname == "IMPORT_NAME" else f"{imported}.{each.argval}"
            yield last
        elif each.opname.startswith("STORE_") and last:
            top = last.split(".")[0]  # "import torch.amp" binds torch
            bound[str(each.argval)] = top if each.argval == top else last
            last = ""
        elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") or each.argval in bound:
            chain = bound.get(each.argval, each.argval)
            yield chain
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = f"{chain}.{each.argval}"
            yield chain
        else:
            chain = ""
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const, bound)


def _value(space: Mapping[str, Any], name: str) -> Any:
    """What a name with dots stands for, as far as it leads through modules; None where that is not known."""
    first, *rest = name.split(".")
    value = space.get(first)
    for part in rest:
        value = getattr(value, part, None) if isinstance(value, types.ModuleType) else None
    return _opened(value)


def _full_name(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
