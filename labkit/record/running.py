"""Which module is running, and in which part of a step: known at every moment, cheaply.

In forward by hooks that torch calls around every module. In backward no module runs: an op is counted to the module in
whose forward its autograd node was made, which the node's sequence number tells. Left out: nodes made by another
thread than the one that runs the forward (a recomputation on a GPU), whose numbers are counted apart.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable

import torch
from torch.nn.modules import module as hooks

# Parts of a step: grad is enabled; backward; recomputation within backward; neither (no_grad, the optimizer).
FORWARD, BACKWARD, AGAIN, APART = range(4)
_task = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node
_enabled = torch.is_grad_enabled
_next_number = torch._C._autograd._get_sequence_nr
_LAST = 2**63  # AccumulateGrad's own number is larger


class Running:
    """The stack of modules whose forward goes on, by numbers that `number` gives."""

    def __init__(self):
        self.stack: list[int] = []
        self.changes: list[tuple[int, int]] = [(0, -1)]  # (next sequence number, module on top from then on)
        self.modules: list[weakref.ref] = []
        self.classes: list[str] = []
        self.numbers: dict[int, int] = {}
        self.after: Callable[[torch.nn.Module, int], None] | None = None
        self.handles: list = []

    def now(self) -> tuple[int, int, int]:
        """(part of the step, running module or -1, autograd node's sequence number or -1)."""
        stack = self.stack
        if _task() == -1:
            return (FORWARD if _enabled() else APART), stack[-1] if stack else -1, -1
        part = AGAIN if _enabled() else BACKWARD
        if stack and part == AGAIN:
            return part, stack[-1], -1
        node = _node()
        return part, -1, -1 if node is None else node._sequence_nr()

    def watch(self, after: Callable[[torch.nn.Module, int], None]) -> None:
        """Begin to follow. after(module, its number): called when a forward has ended, its parameters still there."""
        self.after = after
        self.handles = [
            hooks.register_module_forward_pre_hook(self._begins),
            hooks.register_module_forward_hook(self._ends, always_call=True),
        ]

    def unwatch(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.numbers.clear()

    def number(self, module: torch.nn.Module) -> int:
        """A module's number, given on first sight and never used for another one."""
        found = self.numbers.get(id(module))
        if found is None or self.modules[found]() is not module:
            found = self.numbers[id(module)] = len(self.modules)
            self.modules.append(weakref.ref(module))
            self.classes.append(type(module).__name__)
        return found

    def _begins(self, module, args) -> None:
        number = self.number(module)
        self.stack.append(number)
        self.changes.append((_next_number(), number))

    def _ends(self, module, args, out) -> None:
        number = self.number(module)
        if number in self.stack:  # an exception may have skipped hooks of modules within
            while self.stack.pop() != number:
                pass
        self.changes.append((_next_number(), self.stack[-1] if self.stack else -1))
        self.after(module, number)

    def resolver(self) -> Callable[[tuple | None], int]:
        """A function from what `now` gave to the number of the module, -1 for none."""
        changes = sorted(self.changes, key=lambda change: change[0])  # stable: the last of equals counts
        starts = [start for start, _ in changes]

        def module_of(birth: tuple | None) -> int:
            if birth is None:
                return -1
            _, running, sequence = birth
            if running >= 0 or not 0 <= sequence < _LAST:
                return running
            return changes[bisect_right(starts, sequence) - 1][1]

        return module_of

    def names(self) -> list[str]:
        """Qualified names by module number, as torch gives them from the outermost module; wrappers' "module." is cut.

        The class for an outermost one, and where only that is known. Of outermost modules that have a name in common,
        the first that ran keeps its names; those of the others begin with class and number: "Llama 2.layers.0".
        """
        live = {number: module for number, ref in enumerate(self.modules) if (module := ref()) is not None}
        inner = {id(child) for module in live.values() for child in _children(module).values()}
        outer = [_named(module) for module in live.values() if id(module) not in inner]
        ran = {
            id(live[number]): place for place, (_, number) in reversed(list(enumerate(self.changes))) if number in live
        }
        outer.sort(key=lambda named: min((ran.get(id(part), _LAST) for _, part in named), default=_LAST))
        found: dict[int, str] = {}
        used: set[str] = set()
        for named in outer:
            own = {id(part): name or type(part).__name__ for name, part in named if id(part) not in found}
            if not used.isdisjoint(own.values()):
                own = _set_apart(own, type(named[0][1]).__name__, used)
            found |= own
            used |= set(own.values())
        return [
            found.get(id(live[number]), kind) if number in live else kind for number, kind in enumerate(self.classes)
        ]


def _set_apart(own: dict[int, str], kind: str, used: set[str]) -> dict[int, str]:
    """The names of a module of class `kind` with a beginning that no used one has."""
    number = 2
    while any(name == f"{kind} {number}" or name.startswith(f"{kind} {number}.") for name in used):
        number += 1
    return {part: f"{kind} {number}" + (f".{name}" if name != kind else "") for part, name in own.items()}


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """What DDP, a DeepSpeed engine and the like wrap: their only part that is called "module"."""
    while list(children := _children(module)) == ["module"] and not vars(module).get("_parameters"):
        if not isinstance(children["module"], torch.nn.Module):
            break  # somebody has freed it
        module = children["module"]
    return module


def _children(module: torch.nn.Module) -> dict:
    return vars(module).get("_modules") or {}


def _named(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """(qualified name, part) of an outermost module; nothing where a method of its own raises."""
    try:
        return list(_unwrapped(module).named_modules())
    except Exception:
        return []
