"""A module executed once more from its source, and whether a live value is what such a twin has.

labkit's modules do nothing when imported but define, so they can be executed twice. What a module imports is the
live thing in both, and is compared by identity; whether the live thing is genuine is asked of its own module. Left
out: state that a module gathers while it runs; labkit's modules keep none.
"""

from __future__ import annotations

import builtins
import functools
import gc
import struct
import threading
import types
from typing import Any

# Of a class, what Python writes at run time or differs between two executions of one source.
_OF_CLASSES = (
    "__dict__ __weakref__ __module__ __doc__ __abstractmethods__ _abc_impl __annotations__ __annotate__ "
    "__annotate_func__ __annotations_cache__ __firstlineno__ __static_attributes__ "
    "__slotnames__"
).split()
_BY_TYPE = (object, type(threading.Lock()))  # they hold nothing: one is as good as another
_PLAIN = (int, float, complex, str, bytes, bool, range, types.NoneType, types.EllipsisType, types.NotImplementedType)


def of(module: types.ModuleType, source: bytes) -> dict[str, Any]:
    """The names that `source` gives, executed as `module`. Raises what executing it raises."""
    given = {n: v for n, v in vars(module).items() if n in ("__name__", "__file__", "__package__", "__spec__",
                                                            "__path__", "__loader__")}  # fmt: skip
    twin = {**given, "__builtins__": vars(builtins)}
    exec(compile(source, module.__file__, "exec", dont_inherit=True), twin)
    return twin


def same_code(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two code objects do the same, whatever file they are said to come from."""
    if (a.co_code, a.co_names, a.co_varnames, a.co_freevars) != (
        b.co_code,
        b.co_names,
        b.co_varnames,
        b.co_freevars,
    ):
        return False
    return len(a.co_consts) == len(b.co_consts) and all(
        same_code(x, y) if isinstance(x, types.CodeType) and isinstance(y, types.CodeType) else _same_constant(x, y)
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


def _same_constant(x: Any, y: Any) -> bool:
    return type(x) is type(y) and repr(x) == repr(y) if not isinstance(x, frozenset) else x == y


class Same:
    """Compares values of one module with its twin's. `difference` gives the name of what differs, or ""."""

    def __init__(self, live: dict[str, Any], twin: dict[str, Any]):
        self.live, self.twin = live, twin
        self.seen: set[tuple[int, int]] = set()

    def difference(self, live: Any, twin: Any, where: str) -> str:
        if live is twin or (id(live), id(twin)) in self.seen:
            return ""
        if isinstance(twin, (type, types.FunctionType)):  # these outlive the comparison, so their ids are theirs
            self.seen.add((id(live), id(twin)))
        if isinstance(twin, type):
            return self._classes(live, twin, where)
        if type(live) is not type(twin) and not self._are_twins(type(live), type(twin)):
            return where
        if isinstance(twin, types.FunctionType):
            return self._functions(live, twin, where)
        if isinstance(twin, _PLAIN):
            return "" if repr(live) == repr(twin) else where
        if isinstance(twin, (tuple, list)):
            return where if len(live) != len(twin) else self._each(zip(live, twin, strict=True), where)
        if isinstance(twin, dict):
            return self._each([(list(live), list(twin)), (list(live.values()), list(twin.values()))], where)
        parts = _parts(live), _parts(twin)
        if None not in parts:
            return self.difference(*parts, where)
        return "" if type(twin) in _BY_TYPE or live == twin else where

    def _are_twins(self, live: type, twin: type) -> bool:
        """Whether one is a class of the live module and the other its twin (which are compared on their own)."""
        name = twin.__name__
        return self.twin.get(name) is twin and self.live.get(name) is live

    def _each(self, pairs: Any, where: str) -> str:
        return next((where for live, twin in pairs if self.difference(live, twin, where)), "")

    def _functions(self, live: Any, twin: Any, where: str) -> str:
        home = self.live if twin.__globals__ is self.twin else twin.__globals__
        if live.__globals__ is not home or not same_code(live.__code__, twin.__code__):
            return where
        closures = [tuple(c.cell_contents for c in f.__closure__ or ()) for f in (live, twin)]
        return self._each([(live.__defaults__, twin.__defaults__), (live.__kwdefaults__, twin.__kwdefaults__),
                           tuple(closures)], where)  # fmt: skip

    def _classes(self, live: Any, twin: type, where: str) -> str:
        """A class of another module is the live one in both, so it would have been identical."""
        if not isinstance(live, type) or twin.__module__ != self.twin["__name__"] or type(live) is not type(twin):
            return where
        if live.__name__ != twin.__name__ or live.__module__ != twin.__module__:
            return where
        if self.difference(live.__bases__, twin.__bases__, where):
            return f"{where}.__bases__"
        mine, theirs = vars(live), vars(twin)
        for name in {**theirs, **mine}:
            if name in _OF_CLASSES:
                continue
            if name not in mine or name not in theirs:
                return f"{where}.{name}"
            if name == "_backward_cls":  # torch makes one for every autograd.Function
                made = getattr(mine[name], "_forward_cls", None) is live
                if not made or mine[name].__bases__ != theirs[name].__bases__:
                    return f"{where}.{name}"
                continue
            found = self.difference(mine[name], theirs[name], f"{where}.{name}")
            if found:
                return found
        return ""


def _parts(value: Any) -> Any:
    """What an object of another kind consists of, as something that can be compared; None for what has no parts."""
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, functools.cached_property):
        return value.func, value.attrname
    if isinstance(value, functools._lru_cache_wrapper):  # __wrapped__ is only said, what it holds is called
        return tuple(held for held in gc.get_referents(value) if isinstance(held, types.FunctionType))
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, types.MappingProxyType):
        return dict(value)
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return value.__name__, type(value).__name__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, struct.Struct):
        return value.format
    if isinstance(value, types.UnionType | types.GenericAlias):
        return value.__args__
    if type(value).__module__ == "dataclasses":
        return {n: getattr(value, n, None) for n in type(value).__slots__ if n != "_field_type"}
    held = getattr(value, "__dict__", None)
    return held if held and type(held) is dict and not isinstance(value, types.ModuleType) else None
