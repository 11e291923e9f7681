"""What judges of lab 05 ask of a class before it is tried, and `honest` for an exercise that is about files.

Left out: what the exercises themselves ask for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import labkit.labs.lab03.own_work as own_work
from labkit.check.exercise import Verdict
from labkit.check.honesty import honest
from labkit.check.observed import Observed
from labkit.labs.lab00.attempts import Unusable, still_open
from labkit.record.integrity import Integrity


def unfinished(cls: Any, call: str, *args: Any, **kwargs: Any) -> Any:
    """NotImplemented for an untouched stub, an Unusable for a class that cannot be tried as `call`; None if it can.

    args, kwargs: of the call that the check makes.
    """
    if any(str(each.__module__).startswith("labkit.") for each in getattr(cls, "__mro__", ())):
        return Unusable("ready_made", f"{cls.__name__} is built on labkit's own reference; write it yourself.")
    if not isinstance(cls, type) and not inspect.isfunction(cls):
        sentence = f"this is {type(cls).__name__}, an object: hand in the class, the check makes the object."
        return Unusable("not_a_class", sentence)
    found = still_open(cls)
    if found is not None:
        return found
    if inspect.isfunction(cls):
        return _takes(cls, call, args, kwargs)
    return borrowed(cls) or _takes(cls, call, args, kwargs)


def borrowed(answer: Any) -> Unusable | None:
    """For an answer that has labkit do the work, by name: in its own code or a class that it is built on."""
    while isinstance(answer, functools.partial):
        answer = answer.func
    for one in (answer, *getattr(answer, "__mro__", ())[1:]):
        found = own_work.borrowed(one)
        if found:
            return Unusable("ready_made", own_work.verdict(found, "").sentence)
    return None


def _takes(cls: Any, call: str, args: tuple, kwargs: dict) -> Unusable | None:
    try:
        inspect.signature(cls).bind(*args, **kwargs)
    except TypeError as error:
        return Unusable("wrong_signature", f"the check makes {call}; of yours Python says: {error}.")
    except ValueError:
        pass
    return None


def without(optimizer: Any, cls: Any) -> Unusable | None:
    """An Unusable for an optimizer that lacks step() or zero_grad()."""
    name = getattr(cls, "__name__", "the answer")
    for method in ("step", "zero_grad"):
        found = getattr(optimizer, method, None)
        if not callable(found):
            return Unusable("method_missing", f"{name} has no {method}(); a training loop calls it in every step.")
        try:
            inspect.signature(found).bind()
        except TypeError:
            return Unusable("wrong_signature", f"the check calls {method}() without arguments.")
        except ValueError:
            pass
    return None


def stub_result(cls: Any, method: str, out: Any) -> Unusable | None:
    """For a method that gave NotImplemented after all."""
    if out is not NotImplemented:
        return None
    name = getattr(cls, "__name__", "the answer")
    return Unusable("half_attempted", f"{name}.{method} returns NotImplemented: its part is yet to be written.")


def honest_but(observed: Observed, allowed: Collection[str], tried: str = "") -> Verdict | None:
    """`honest`, where findings of the codes in `allowed` belong to the exercise: using files, say."""
    kept = [_without(each, allowed) for each in observed.integrity]
    told = [_told(witness, allowed) for witness in observed.witnesses]
    return honest(replace(observed, integrity=tuple(kept), witnesses=tuple(told)), tried)


def _without(integrity: Any, allowed: Collection[str]) -> Any:
    if not isinstance(integrity, Integrity):
        return integrity
    return replace(integrity, findings=tuple(each for each in integrity.findings if each.code not in allowed))


def _told(witness: tuple, allowed: Collection[str]) -> tuple:
    """What a rank told while it ran, and at the end how many: that number is lowered by what is left out, and only
    where it was right."""
    kept = [each for each in witness if not (type(each) is list and len(each) == 3 and each[0] in allowed)]
    if kept and type(kept[-1]) is int and kept[-1] == len(witness) - 1:
        kept[-1] = len(kept) - 1
    return tuple(kept)
