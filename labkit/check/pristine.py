"""Is what a verdict rests on still what was installed? labkit's modules against their source, torch's and numpy's
entries against what made them.

Each labkit module that decides a verdict is executed once more from its source file, under another roof, and every
name of the live module is compared with its twin: code and defaults of functions, methods and the ones that a
dataclass generates, values of constants, imported things by identity, and no name that the source does not bind
(such a name would shadow a builtin). The builtins themselves, torch's and numpy's entries must be what their
libraries made. This stops a patched `torch.allclose`, `labkit.check` or `Trace` in a notebook, and accidents. Out of
reach: whoever rewrites this very file's functions, or memory, in the running session. A grade therefore rests on
`labkit.check.rerun`, the same judge in a process that never ran the notebook.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.check import twins

# Rooms that decide a verdict.
ROOMS = ("labkit.check", "labkit.labs", "labkit.ranks", "labkit.record", "labkit.schedule")
# (module, entry, module in which it must have been made, or the type of C code)
ENTRIES = (
    ("torch", "allclose", "builtin"),
    ("torch", "equal", "builtin"),
    ("torch", "isclose", "builtin"),
    ("torch", "eq", "builtin"),
    ("torch.Tensor", "allclose", "builtin"),
    ("torch.Tensor", "equal", "builtin"),
    ("torch.Tensor", "numpy", "builtin"),
    ("torch.Tensor", "tolist", "builtin"),
    ("torch.Tensor", "item", "builtin"),
    ("torch.Tensor", "detach", "builtin"),
    ("torch.Tensor", "cpu", "builtin"),
    ("numpy", "argwhere", "builtin"),
    ("numpy", "abs", "builtin"),
    ("pickle", "loads", "builtin"),
    ("pickle", "dumps", "builtin"),
    ("cloudpickle", "dumps", "cloudpickle.cloudpickle"),
    ("os", "urandom", "builtin"),
)
_C_NAMES = {"abs": "absolute"}
# Builtins that judges use. Left out: print, input, open and __import__, which notebooks and debuggers replace.
_BUILTINS = (
    "abs all any bool bytearray bytes callable chr classmethod complex delattr dict dir divmod enumerate eval exec "
    "filter float format frozenset getattr globals hasattr hash hex id int isinstance issubclass iter len list map "
    "max memoryview min next object ord pow property range repr reversed round set setattr slice sorted staticmethod "
    "str sum super tuple type vars zip"
).split()
# What Python itself puts into a module.
_OF_PYTHON = (
    "__name__ __doc__ __package__ __loader__ __spec__ __file__ __cached__ __builtins__ __path__ __warningregistry__ "
    "__annotations__ __conditional_annotations__"
).split()


def first_patched() -> str:
    """The name of an entry that is not what was installed, e.g. "torch.allclose"; "" when all are."""
    for name in _patched_builtins():
        return name
    for name in _patched_entries():
        return name
    for name in sorted(sys.modules):
        if name == "labkit" or any(name == room or name.startswith(f"{room}.") for room in ROOMS):
            for found in patched_in(sys.modules[name]):
                return found
    return ""


def patched_in(module: types.ModuleType) -> Iterator[str]:
    """Names of a labkit module that its source file does not account for."""
    path = getattr(module, "__file__", None)
    if not path or not path.endswith(".py"):
        return
    live, twin = vars(module), twins.of(module, Path(path).read_bytes())
    if live.get("__builtins__") not in (builtins, vars(builtins)):
        yield f"{module.__name__}.__builtins__"
    same = twins.Same(live, twin)
    for name, value in twin.items():
        if name in _OF_PYTHON:
            continue
        difference = same.difference(live.get(name, _OF_PYTHON), value, f"{module.__name__}.{name}")
        if difference:
            yield difference
    for name, value in live.items():
        submodule = sys.modules.get(f"{module.__name__}.{name}")
        if name not in twin and name not in _OF_PYTHON and (submodule is None or value is not submodule):
            yield f"{module.__name__}.{name}"


def _patched_builtins() -> Iterator[str]:
    for name in _BUILTINS:
        found = vars(builtins).get(name)
        if type(found) is type:
            genuine = found.__module__ == "builtins" and found.__name__ == name and not found.__flags__ & _ON_HEAP
        else:
            genuine = type(found) is type(len) and found.__name__ == name and found.__self__ is builtins
        if not genuine:
            yield f"builtins.{name}"


_ON_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement


def _patched_entries() -> Iterator[str]:
    for owner, name, home in ENTRIES:
        module, _, kind = owner.rpartition(".") if owner == "torch.Tensor" else (owner, "", "")
        holder = sys.modules.get(module or owner)
        if holder is None:
            continue
        found = getattr(getattr(holder, kind) if kind else holder, name, None)
        if not _is_from(found, name, home):
            yield f"{owner}.{name}"


def _is_from(found: Any, name: str, home: str) -> bool:
    if home == "builtin":
        of_c = type(found).__module__.split(".")[0] in ("builtins", "numpy")
        python = isinstance(found, types.FunctionType | types.MethodType | type(None))
        return of_c and not python and getattr(found, "__name__", "") in (name, _C_NAMES.get(name))
    code = getattr(found, "__code__", None)
    return code is not None and code.co_filename == getattr(sys.modules.get(home), "__file__", None)
