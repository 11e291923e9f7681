"""Calls that cannot give an answer, ranks that gave none, and who waits for whom: what judges of several labs ask.

A wrong signature, `async` and `yield` are seen in the rank before the function runs: an error from inside
labkit would name labkit's own lines. Left out: what a failed run says of one exercise; its judge knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.check import evidence, stubs
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong

# Causes that say all there is to say: a judge adds no guess of its own.
CAUSES = ("not_attempted", "half_attempted", "wrong_signature", "async", "generator", "wrong_type", "polled")

_PLAIN = "return a plain value, as the task says"


@dataclass(frozen=True)
class Unusable:
    """Comes back from a rank in place of a result: why there is none that can be judged."""

    cause: str
    sentence: str


def still_open(cls: Any, name: str = "") -> Any:
    """NotImplemented for an untouched stub, an Unusable for a class with some methods still to be written, else None.

    name: what to call it; by default its own.
    """
    if stubs.is_stub(cls):
        return NotImplemented
    open_ = stubs.stub_methods(cls) if isinstance(cls, type) else []
    if not open_:
        return None
    sentence = f"{name or cls.__name__}.{open_[0]} is still a stub: its part is yet to be written."
    return Unusable("half_attempted", sentence)


def called(fn: Callable, names: str, *args: Any) -> Any:
    """Runs in a rank: what `fn(*args)` returned, or an Unusable. `names`: of the arguments, "tensor, root"."""
    from labkit.ranks.rank import report

    found = _cannot_be_called(fn, names, args)
    if found is not None:
        return found
    if _names(getattr(fn, "__code__", None), "is_completed"):
        report(polls=1)  # reaches the judge also when this call never ends
    out = fn(*args)
    return _not_plain(fn, out) or out


def no_result(out: Any) -> bool:
    """Whether `out` stands for no answer at all: the stub's NotImplemented, or Unusable."""
    return out is NotImplemented or type(out) is Unusable


def ran(observed: Observed, name: str, tried: str) -> Verdict | None:
    """As `evidence.ran`, and also the causes that show only here: see CAUSES."""
    for out in observed.results:
        if type(out) is Unusable:
            return wrong("attempted", out.cause, out.sentence, tried)
    stubs = [rank for rank, out in enumerate(observed.results) if out is NotImplemented]
    others = [rank for rank in range(observed.world_size) if rank not in stubs]
    if stubs and others:
        sentence = f"rank {stubs[0]} returned NotImplemented, rank {others[0]} did not: its part is yet to be written."
        return wrong("attempted", "half_attempted", sentence, tried, f"rank {stubs[0]}: NotImplemented", "an answer")
    failed = evidence.ran(observed, name, tried)
    polls = any("polls" in values for _, values in observed.outcome.reports)
    if failed is not None and polls and failed.cause in ("deadline", "stalled"):
        sentence = "with gloo `is_completed()` stays False until `wait()`: a loop on it never ends; call `wait()`."
        return wrong("attempted", "polled", sentence, tried, failed.got, failed.expected)
    return failed


def all_wait_in(observed: Observed, verb: str) -> bool:
    """Whether a run failed with every rank waiting in a call of "send" or "recv"."""
    doing = [place.doing for place in observed.outcome.cause.whereabouts if place.state == "waiting"]
    return len(doing) == observed.world_size and all(what.startswith(verb) for what in doing)


def never_waited(observed: Observed) -> tuple[int, str] | None:
    """(rank, op) of the first message or collective that was issued and never waited for; None for none."""
    for rank, record in enumerate(observed.records):
        for event in record.never_waited if record is not None else ():
            return rank, event.op
    return None


def left_open(observed: Observed) -> int | None:
    """The first rank that received without ever calling wait(): nothing touched the tensor, or an op did too soon."""
    for rank, record in enumerate(observed.records):
        if record is None:
            continue
        called = {wait.of for wait in record.waits if wait.how == "call"}
        raced = {wait.of for wait in record.waits if wait.how == "touched"} - called
        raced |= {event.index for event in record.never_waited}
        if any(event.op == "recv" and event.index in raced for event in record.communications):
            return rank
    return None


def all_waited(observed: Observed, tried: str) -> Verdict | None:
    """Stage "evidence": every recv was waited for. Cause "not_waited"; here the values came all the same."""
    if left_open(observed) is None:
        return None
    sentence = "the values came in time by luck: nothing waited for the recv before its tensor was returned."
    return wrong("evidence", "not_waited", sentence, tried, "a recv without wait()", "every recv waited for")


def _cannot_be_called(fn: Callable, names: str, args: Sequence[Any]) -> Unusable | None:
    name = getattr(fn, "__name__", "the function")
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        return Unusable("async", f"{name} is async: calling it runs nothing. Write `def {name}` without async.")
    if inspect.isgeneratorfunction(fn):
        return Unusable("generator", f"{name} has a yield: calling it runs nothing. Return the answer instead.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some callables written in C have none
        return None
    try:
        signature.bind(*args)
    except TypeError:
        mine = ", ".join(signature.parameters)
        return Unusable("wrong_signature", f"the check calls {name}({names}); yours is {name}({mine}).")
    return None


def _not_plain(fn: Callable, out: Any) -> Unusable | None:
    """A result of a class that the judge does not open, or a tensor whose values it cannot see."""
    import torch

    name, kind = getattr(fn, "__name__", "the function"), type(out)
    if isinstance(out, torch.Tensor):
        if out.device.type == "meta" or out.layout is not torch.strided:
            what = "a tensor without values (device meta)" if out.device.type == "meta" else "a sparse tensor"
            return Unusable("wrong_type", f"{name} returned {what}; return a plain, dense one.")
        plain = kind in (torch.Tensor, torch.nn.Parameter)
    else:
        plain = kind.__module__ in ("builtins", "collections", "numpy", "torch")
    return None if plain else Unusable("wrong_type", f"{name} returned an object of class {kind.__name__}; {_PLAIN}.")


def _names(code: Any, name: str) -> bool:
    """Whether a function's code, or that of a function within it, names an attribute or global `name`."""
    if code is None:
        return False
    return name in code.co_names or any(_names(c, name) for c in code.co_consts if inspect.iscode(c))
