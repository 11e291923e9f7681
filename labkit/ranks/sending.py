"""Turning a function and its arguments into bytes for the ranks, and naming what cannot travel.

Left out: sending by reference to source files. A function from a notebook cell travels whole.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any

from labkit.ranks.outcome import LaunchError


def pack_function(function: Callable) -> bytes:
    """The function as bytes. Raises LaunchError that names the variable that cannot be sent."""
    if not callable(function):
        raise LaunchError(f"launch needs a function to run on every rank, not {_a(function)}")
    return _pack(function, lambda: _culprit(function))


def pack_arguments(arguments: tuple[Any, ...]) -> bytes:
    """Arguments as bytes. Raises LaunchError that names the argument that cannot be sent."""

    def culprit() -> str:
        bad = [f"argument {i} ({_a(value)})" for i, value in enumerate(arguments) if not _packs(value)]
        return bad[0] if bad else "an argument"

    return _pack(arguments, culprit)


def dumps(value: Any, reducers: dict[type, Callable] | None = None) -> bytes:
    """cloudpickle.dumps, with `reducers` of the caller's for exact types, and code that keeps its file name.

    cloudpickle calls all code from a notebook "<dynamic-code>"; then no line could be told.
    """
    import cloudpickle

    standard = cloudpickle.CloudPickler.dispatch_table
    named = _code_reducer(standard[types.CodeType])

    ours = {types.CodeType: named, functools._lru_cache_wrapper: _reduce_cached, **(reducers or {})}

    class Pickler(cloudpickle.CloudPickler):
        # On the class: the C pickler reads its table once, before an instance could be given another.
        dispatch_table = ChainMap(ours, standard)

        def reducer_override(self, value):
            # torch.ops and the like: modules of a class of their own, which cloudpickle would take apart.
            if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
                return importlib.import_module, (value.__name__,)
            return super().reducer_override(value)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _code_reducer(standard: Callable) -> Callable:
    def reduce(code: types.CodeType) -> tuple:
        return _named_code, (code.co_filename, *standard(code)[:2])

    return reduce


def _reduce_cached(function: Any) -> tuple | str:
    """A function under functools.cache: from a notebook it travels with its code, its cache empty."""
    if function.__module__ in (None, "__main__") or function.__module__ not in sys.modules:
        return _cached, (function.__wrapped__, function.cache_parameters())
    return function.__qualname__


def _cached(function: Callable, parameters: dict) -> Callable:
    return functools.lru_cache(**parameters)(function)


def _named_code(filename: str, build: Callable, arguments: tuple) -> types.CodeType:
    return build(*arguments).replace(co_filename=filename)


def _pack(value: Any, culprit: Callable[[], str]) -> bytes:
    try:
        return dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError, NotImplementedError,
            RuntimeError) as error:
        raise LaunchError(
            f"{culprit()} cannot be sent to the ranks ({type(error).__name__}: {error}); "
            "make it inside the function, where each rank gets its own"
        ) from None


def _packs(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def _culprit(function: Callable, depth: int = 3) -> str:
    """The variable of a function (closure, global, default; also of functions it uses) that does not pickle."""
    name = getattr(function, "__name__", "the function")
    for variable, value in _variables(function).items():
        if not _packs(value):
            written = hasattr(value, "__code__") or isinstance(value, type)
            deeper = _culprit(value, depth - 1) if depth and written else ""
            if deeper and not deeper.startswith(("function", "class")):
                return deeper
            return f"variable `{variable}` ({_a(value)}), used by `{name}`,"
    return f"{'class' if isinstance(function, type) else 'function'} `{name}`"


def _variables(function: Callable) -> dict[str, Any]:
    if isinstance(function, type):  # what it holds, and what its methods use
        found = {}
        for name, held in vars(function).items():
            method = getattr(held, "fget", None) or getattr(held, "__func__", held)
            if hasattr(method, "__code__"):
                found.update(_variables(method))
            elif not isinstance(held, type) and not name.startswith("__"):
                found[f"{function.__name__}.{name}"] = held
        return found
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    variables = {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for i, value in enumerate(function.__defaults__ or ()):
        variables[f"default {i}"] = value
    return variables


def _a(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
