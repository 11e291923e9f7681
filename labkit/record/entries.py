"""Identity of the entries a check rests on, taken before and compared after: torch's, and labkit's own.

A function is known by its object, its code and its defaults, so a replaced `__code__` is seen as well; a constant by
its value, so an emptied list is. Of labkit's modules also new names that shadow a builtin are told. Left out:
attributes of the learner's own modules, and anything that is patched and put back in between.
"""

from __future__ import annotations

import builtins
import functools
import sys
import types
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

_TORCH = "allclose equal isclose from_numpy frombuffer from_file tensor".split()
_TENSOR = "numpy __array__ data_ptr allclose equal share_memory_ copy_ item tolist".split()
_ROOMS = ("labkit.record.", "labkit.ranks.", "labkit.check.", "labkit.labs.")
_CONSTANTS = (int, float, str, bytes, tuple, list, dict, set, frozenset)
_COMPARED = (types.FunctionType, type, functools._lru_cache_wrapper, *_CONSTANTS)


def remember() -> Callable[[], list[str]]:
    """Take a snapshot. The function that comes back gives the names of what is another thing by the time it is called.

    It puts back the builtins and what this module consists of: what looks on from there needs them.
    """
    holders, shadows = _holders(), _shadows()
    before, own, kept = _snapshot(holders), dict(globals()), dict(builtins.__dict__)

    def changed() -> list[str]:
        found, mine = {**builtins.__dict__}, {**globals()}
        builtins.__dict__.update(kept)
        globals().update(own)
        now = _snapshot(holders)
        now |= {f"builtins.{name}": _known_by(value) for name, value in found.items()}
        replaced = {name for name, what in before.items() if now.get(name) != what}
        replaced |= {f"{__name__}.{name}" for name, value in own.items() if mine.get(name) is not value}
        return sorted(replaced | (_shadows() - shadows))

    return changed


def _snapshot(holders: list[tuple[str, Callable, list[str]]]) -> dict[str, tuple]:
    taken = {}
    for prefix, look_up, names in holders:
        for name in names:
            value = look_up(name)
            if value is not None:
                taken[f"{prefix}.{name}"] = _known_by(value)
    return taken


def _holders() -> list[tuple[str, Callable, list[str]]]:
    """(name, how to look an entry up, entries) of everything compared."""
    wanted = [("builtins", vars(builtins).get, [n for n in vars(builtins) if n != "_"])]
    wanted += [("torch", vars(torch).get, _TORCH), ("torch.Tensor", partial(getattr, torch.Tensor), _TENSOR)]
    if dist.is_available():
        module = vars(dist.distributed_c10d)
        own = [n for n in module["__all__"] if type(module.get(n)) is types.FunctionType]
        wanted += [("torch.distributed", vars(dist).get, own), ("torch.distributed.distributed_c10d", module.get, own)]
        wanted.append(("Work", vars(dist.Work).get, ["wait", "synchronize"]))
        wanted.append(("ProcessGroup", vars(dist.ProcessGroup).get, list(vars(dist.ProcessGroup))))
    for name, module in list(sys.modules.items()):
        if name.startswith(_ROOMS):
            entries = {n: v for n, v in vars(module).items() if isinstance(v, _COMPARED) and not n.startswith("__")}
            wanted.append((name, vars(module).get, list(entries)))
            for kind, thing in entries.items():
                if isinstance(thing, type) and thing.__module__ == name:
                    methods = [m for m, v in vars(thing).items() if isinstance(v, types.FunctionType | property)]
                    wanted.append((f"{name}.{kind}", vars(thing).get, methods))
    return wanted


def _shadows() -> set[str]:
    """Names of builtins that a module of labkit has for itself."""
    return {
        f"{name}.{shadow}"
        for name, module in list(sys.modules.items())
        if name.startswith(_ROOMS)
        for shadow in vars(module).keys() & vars(builtins).keys()
        if not shadow.startswith("__")
    }


def _known_by(value: object) -> tuple:
    if isinstance(value, property):
        return _known_by(value.fget)
    if isinstance(value, _CONSTANTS):
        return id(value), repr(value)
    if type(value) is not types.FunctionType:
        # A bound or pybind method is made anew at each look; what it stands for is not.
        inner = getattr(value, "__func__", None)
        return (id(value if inner is None else inner),)
    known = [id(value), id(value.__code__), id(value.__defaults__)]
    inner = getattr(value, "__wrapped__", None)
    return tuple(known) if inner is None else (*known, *_known_by(inner))
