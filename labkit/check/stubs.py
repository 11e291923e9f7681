"""Which functions and classes are untouched stubs, as `labkit build` leaves them in a learner edition.

A function's stub is `return NotImplemented`. So is a method's, but for `__init__`, which cannot return it and raises
NotImplementedError("NAME is still a stub"), NAME being its class's. A class is a stub while all its methods are. Seen
in the bytecode, so that comments and docstrings may be changed. An ordinary NotImplementedError is no stub: an answer
may well raise one. `@torch.no_grad()` and its like may stand before a stub. Left out: what Python itself puts into a
class (a dataclass's __init__, say): it counts as written.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

# What differs between versions of Python and means nothing here.
_SKIPPED = ("RESUME", "CACHE", "NOP", "EXTENDED_ARG", "COPY_FREE_VARS")


def init_stub(name: str) -> str:
    """The line that stands for the body of a class's `__init__`."""
    return f'raise NotImplementedError("{name} is still a stub")'


def is_stub(answer: Any) -> bool:
    """True for an untouched function, and for a class all of whose own methods are untouched (and that has one)."""
    if isinstance(answer, type):
        methods = _methods(answer)
        return bool(methods) and len(stub_methods(answer)) == len(methods)
    return _is_bare(answer)


def stub_methods(cls: type) -> list[str]:
    """Names of a class's own methods that are still to be written, in the order of its source."""
    return [name for name, method in _methods(cls).items() if _is_bare(method) or _refuses(method, cls.__name__)]


def _methods(cls: type) -> dict[str, types.FunctionType]:
    """A class's own functions, static and class methods, and getters of properties, by name."""
    found = {}
    for name, value in vars(cls).items():
        value = _undecorated(getattr(value, "fget", None) or getattr(value, "__func__", value))
        if isinstance(value, types.FunctionType):
            found[name] = value
    return found


def _undecorated(function: Any) -> Any:
    """Without torch's decorators by a context (no_grad and the like); any other decorator is part of an answer."""
    while getattr(function, "__globals__", {}).get("__name__") == "torch.utils._contextlib":
        function = getattr(function, "__wrapped__", None)
    return function


def _is_bare(function: Any) -> bool:
    """Whether a function's whole body, but for a docstring, is `return NotImplemented`."""
    code = getattr(_undecorated(function), "__code__", None)
    return code is not None and _steps(code) == [("LOAD_GLOBAL", "NotImplemented"), ("RETURN_VALUE", None)]


def _refuses(function: types.FunctionType, name: str) -> bool:
    """Whether an `__init__` only refuses, by the line of `init_stub`, before or after `super().__init__()`."""
    return function.__name__ == "__init__" and _steps(function.__code__) in _refusals(name)


@functools.lru_cache(maxsize=8)
def _refusals(name: str) -> tuple[list, ...]:
    bodies = init_stub(name), f"super().__init__(); {init_stub(name)}"
    return tuple(_steps(_code_of(f"class C:\n def __init__(self): {body}", "__init__")) for body in bodies)


def _code_of(source: str, name: str) -> types.CodeType:
    """The code of the function `name` somewhere in `source`."""
    waiting = [compile(source, "<stub>", "exec")]
    while waiting:
        code = waiting.pop()
        if code.co_name == name:
            return code
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    raise ValueError(f"there is no {name} in {source!r}")


def _steps(code: types.CodeType) -> list[tuple[str, Any]]:
    return [(i.opname, i.argval) for i in dis.get_instructions(code) if i.opname not in _SKIPPED]
