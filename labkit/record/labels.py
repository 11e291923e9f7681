"""What storages are for, by whoever holds their tensors: parameter, gradient, optimizer, buffer.

Looked at on entry, on leaving, when a forward or an optimizer's step has ended, and whenever autograd has added a
gradient; the strongest label that a storage ever had stays, in the order above. What follows from ops and
communication alone (copies, buckets, activations) is worked out afterwards, by `kinds`. Left out: optimizers that are
not torch's, unless they are given (see `Trace`), or DeepSpeed's; and, without a word, whatever raises when it is
looked at, for a learner's half-made module must not break the next trace.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from labkit.record import zero_engines
from labkit.record.components import components
from labkit.record.memory import Holdings
from labkit.record.running import Running
from labkit.record.zero_engines import tensors_in, tensors_of

PARAMETER, GRADIENT, OPTIMIZER, BUFFER = ORDER = ("parameter", "gradient", "optimizer", "buffer")
SEVERAL = -2  # in place of a module's number


class Labels:
    """kinds: rank in ORDER by storage. owners: number of the module that a storage belongs to. buckets: storages that
    are buckets of an engine, whatever points into them. weak: storages of what an optimizer steps or, of one's own,
    holds; what is known otherwise counts more.
    """

    def __init__(self, holdings: Holdings, running: Running, optimizers: Iterable[object] = ()):
        self.holdings, self.running = holdings, running
        self.given = list(optimizers)
        self.kinds: dict[int, int] = {}
        self.owners: dict[int, int] = {}
        self.buckets: set[int] = set()
        self.weak: set[int] = set()
        self.engines: dict[int, weakref.ref] = {}
        self.names: list[str] = []
        self.optimizers: dict[int, tuple[weakref.ref, int]] = {}  # by id; entries of its state at the last look
        self.parameters: dict[int, tuple[weakref.ref, int]] = {}  # by id: of a module's parameters, and the module
        self.handles: list = []
        self.following = True

    def watch(self, owners: list) -> None:
        """Begin: with the modules and optimizers that are alive."""
        for owner in owners:
            if isinstance(owner, torch.nn.Module) and is_made(owner):
                with contextlib.suppress(Exception):
                    self.look_at_module(owner, self.running.number(owner))
        for owner in owners:
            if isinstance(owner, torch.optim.Optimizer) and is_made(owner):
                with contextlib.suppress(Exception):
                    self.look_at_optimizer(owner)
        with contextlib.suppress(Exception):
            self.look_at_others()
        self.running.watch(self.forward_ended)
        self.handles += [
            module_hooks.register_module_parameter_registration_hook(self._registered),
            module_hooks.register_module_buffer_registration_hook(self._buffer_registered),
            optimizer_hooks.register_optimizer_step_pre_hook(self._step_begins),
            optimizer_hooks.register_optimizer_step_post_hook(self._step_ended),
        ]

    def close(self) -> None:
        """The last look; then nothing of the trace stays on torch's or the learner's objects."""
        self.following = False
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.running.unwatch()
        self.names = list(self.running.classes)
        with contextlib.suppress(Exception):  # an answer may even have replaced a builtin, which others have to tell
            self.look_again()
            self.names = self.running.names()
        self.given.clear()

    def look_again(self) -> None:
        for number, ref in enumerate(self.running.modules):
            if (module := ref()) is not None:
                with contextlib.suppress(Exception):
                    self.look_at_module(module, number)
        for ref, _ in list(self.optimizers.values()):
            if (optimizer := ref()) is not None:
                with contextlib.suppress(Exception):
                    self.look_at_optimizer(optimizer)
        with contextlib.suppress(Exception):
            self.look_at_others()

    def mark(self, tensor: torch.Tensor | None, kind: str, module: int = -1) -> None:
        """Label the storage of a tensor, unless it has a stronger label."""
        if tensor is None:
            return
        rank, known = ORDER.index(kind), self.holdings.known_number
        plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
        for local in (tensor,) if plain and tensor.layout is torch.strided else _components(tensor):
            number = known(local)
            if number is not None and self.kinds.get(number, len(ORDER)) > rank:
                self.kinds[number] = rank
                if module >= 0:
                    self.owners[number] = module
            elif (
                module >= 0
                and self.owners.get(number, module) not in (module, SEVERAL)
                and local.nbytes < local.untyped_storage().nbytes()  # a flat one; a tied one is the first one's
            ):
                self.owners[number] = SEVERAL

    def mark_weak(self, tensor: torch.Tensor) -> None:
        numbers = (self.holdings.known_number(local) for local in _components(tensor))
        self.weak.update(number for number in numbers if number is not None)

    def look_at_module(self, module: torch.nn.Module, number: int) -> None:
        with torch._C.DisableTorchFunction():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.look_at_parameter(parameter, number)
            for buffer in module._buffers.values():
                self.mark(buffer, BUFFER, number)
        if zero_engines.wrapper_of(module) is not None:
            self.engines[number] = weakref.ref(module)

    def look_at_parameter(self, parameter: torch.Tensor, module: int) -> None:
        if not self.holdings.counts_any(parameter):
            return
        self.mark(parameter, PARAMETER, module)
        self.mark(getattr(parameter, "ds_tensor", None), PARAMETER, module)
        if parameter.is_leaf:
            self.mark(parameter.grad, GRADIENT, module)
        known = self.parameters.get(id(parameter))
        if known is None or known[0]() is not parameter:
            self.parameters[id(parameter)] = weakref.ref(parameter), module
            if parameter.requires_grad and parameter.is_leaf:
                self.follow(parameter)

    def follow(self, parameter: torch.Tensor) -> None:
        """Hear of every gradient that autograd adds, before the learner's own hooks can free it."""
        if not (self.following and self.holdings.counts_any(parameter)):
            return
        handle = parameter.register_post_accumulate_grad_hook(self._accumulated)
        hooks = parameter._post_accumulate_grad_hooks
        others = {number: hook for number, hook in hooks.items() if number != handle.id}
        for number in others:  # torch calls in the order of insertion, whatever OrderedDict says
            del hooks[number]
        hooks.update(others)
        self.handles.append(handle)

    def module_of(self, parameter: object) -> int:
        found = self.parameters.get(id(parameter))
        return found[1] if found is not None and found[0]() is parameter else -1

    def look_at_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        with torch._C.DisableTorchFunction():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.mark(parameter.grad, GRADIENT, self.module_of(parameter))

    def look_at_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Its state; and what it steps that no module owns: master weights, or with no module at all, parameters."""
        self.optimizers[id(optimizer)] = weakref.ref(optimizer), len(optimizer.state)
        self.look_at_gradients(optimizer)
        with torch._C.DisableTorchFunction():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    module = self.module_of(parameter)
                    alone = module < 0 and any(number >= 0 for _, number in self.parameters.values())
                    self.mark(parameter, OPTIMIZER if alone else PARAMETER, module)
                    if alone:
                        self.mark_weak(parameter)
                    if module < 0 and parameter.requires_grad and id(parameter) not in self.parameters:
                        self.parameters[id(parameter)] = weakref.ref(parameter), -1
                        self.follow(parameter)
            for parameter, state in optimizer.state.items():
                for tensor in tensors_in(state):
                    self.mark(tensor, OPTIMIZER, self.module_of(parameter))

    def entries_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Entries of its state when it was last looked at; -1 for one that never was, whoever had its id before."""
        ref, entries = self.optimizers.get(id(optimizer), (None, -1))
        return entries if ref is not None and ref() is optimizer else -1

    def look_at_others(self) -> None:
        """Optimizers that are not torch's: those that were given, and DeepSpeed's."""
        with torch._C.DisableTorchFunction():
            for owner in self.given:
                for tensor in tensors_of(owner):
                    self.mark_weak(tensor)
            for wrapper in self.wrappers():
                for tensor in zero_engines.gradients_of(wrapper):
                    self.mark(tensor, GRADIENT)
                for tensor in zero_engines.masters_of(wrapper):
                    self.mark(tensor, OPTIMIZER)
                if (inner := zero_engines.inner_of(wrapper)) is not None:
                    self.look_at_optimizer(inner)
            self.look_at_buckets()

    def look_at_buckets(self) -> None:
        for wrapper in self.wrappers():
            for tensor in zero_engines.buckets_of(wrapper):
                number = self.holdings.known_number(tensor)
                if number is not None:
                    self.buckets.add(number)

    def wrappers(self) -> list[object]:
        found = (zero_engines.wrapper_of(engine) for ref in self.engines.values() if (engine := ref()) is not None)
        return [wrapper for wrapper in found if wrapper is not None]

    def forward_ended(self, module: torch.nn.Module, number: int) -> None:
        if module._parameters or module._buffers:
            with contextlib.suppress(Exception):
                self.look_at_module(module, number)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():
            module = self.module_of(parameter)
            self.mark(parameter, PARAMETER, module)
            self.mark(parameter.grad, GRADIENT, module)
            if self.engines:
                self.look_at_buckets()

    def _registered(self, module: torch.nn.Module, name: str, parameter: torch.Tensor | None) -> None:
        if parameter is not None:
            with torch._C.DisableTorchFunction():
                self.look_at_parameter(parameter, self.running.number(module))

    def _buffer_registered(self, module: torch.nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunction():
            self.mark(buffer, BUFFER, self.running.number(module))

    def _step_begins(self, optimizer, args, kwargs) -> None:
        with contextlib.suppress(Exception):
            if self.engines:
                self.look_at_others()
            if self.entries_of(optimizer) >= 0:
                self.look_at_gradients(optimizer)
            else:
                self.look_at_optimizer(optimizer)

    def _step_ended(self, optimizer, args, kwargs) -> None:
        with contextlib.suppress(Exception):
            if self.entries_of(optimizer) != len(optimizer.state):
                self.look_at_optimizer(optimizer)


def is_made(owner: torch.nn.Module | torch.optim.Optimizer) -> bool:
    """Whether its base class's constructor was ever called: one that failed lives on in the traceback."""
    own = ("_parameters", "_buffers", "_modules") if isinstance(owner, torch.nn.Module) else ("param_groups", "state")
    return all(name in vars(owner) for name in own)


def _components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """`components`, which may ask by ops, without their being recorded."""
    from torch.utils._python_dispatch import _disable_current_modes

    quiet: Callable = contextlib.nullcontext if hasattr(tensor, "__tensor_flatten__") else _disable_current_modes
    with quiet():
        return components(tensor)
