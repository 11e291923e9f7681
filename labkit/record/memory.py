"""Bytes held, storage by storage: counted on first sight, given back by a weak reference when freed.

A storage is known by its C++ address while it lives, and by a number that is never used again. What was held
on entry is found by walking live tensors; what that misses (a reducer's bucket, what autograd saved) is
entered there afterwards. Left out: memory inside a kernel and inside C++ that no op shows, and caching by an
allocator: these are bytes held by tensors, not bytes taken from the system.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from sys import _getframe  # by name: `watching` puts a telltale in sys meanwhile

import torch

from labkit.record.components import NO_STORAGE, components

# Files from which torch's C++ is called that issues ops of its own: autograd's engine, DDP's reducer.
_ENGINE, _DDP = torch.autograd.graph.__file__, "torch/nn/parallel/distributed.py"
_OWN = __file__.removesuffix("memory.py")


class _Held(weakref.ref):
    """Weak reference to a storage that remembers its number, address and size."""

    __slots__ = ("number", "address", "num_bytes")


class Holdings:
    """Bytes held now and every change of them. `clock()` gives the index of the event that is going on, `now()` what
    is kept of the moment in which a storage is first seen (see `running`).
    """

    def __init__(self, clock: Callable[[], int], now: Callable[[], tuple] = tuple, fake: bool = False):
        self.fake = fake  # whether storages without memory (meta, fake) weigh what they would
        self.clock = clock
        self.now = now
        self.births: list[tuple | None] = []  # by a storage's number; None for one that was there before
        self.by_address: dict[int, _Held] = {}
        self.begin: list[tuple[int, int]] = []
        self.deltas: list[tuple[int, int, int]] = []
        self.freed: set[int] = set()  # in a backward, of what was there before
        self.count = 0
        self.first_node = torch.autograd._get_sequence_nr()  # of autograd's nodes that are made from now on
        self.mode: object | None = None
        self.closed = False
        self.resize: object = None
        self.wrapped = False

    def number_of(self, tensor: torch.Tensor, before: bool = False) -> int:
        """Number of a tensor's storage, entered if it is new: as made now, or `before` the trace began.

        -1 for a tensor without a storage (see `components`).
        """
        try:
            storage = tensor.untyped_storage()
        except NO_STORAGE:
            return -1
        held = self.by_address.get(storage._cdata)
        return held.number if held is not None else self.enter(storage, before)

    def known_number(self, tensor: torch.Tensor) -> int | None:
        """Number of a tensor's storage, None when it was never met."""
        try:
            held = self.by_address.get(tensor.untyped_storage()._cdata)
        except NO_STORAGE:
            return None
        return None if held is None else held.number

    def was_there(self, tensor: torch.Tensor, changed: bool) -> bool:
        """Whether a storage never seen is older than the trace: C++ alone knew of it, and C++ uses it.

        That is a reducer's bucket, or what autograd saved. Data that Python brings (torch.tensor, from_numpy) are made
        now, wherever an op meets them first: else their end would count, and their begin would not. changed: whether
        the op writes to it.
        """
        backward = torch._C._current_graph_task_id() != -1
        node = torch._C._current_autograd_node() if backward else None
        if node is not None and node._sequence_nr() < self.first_node:
            return True
        if not (backward or changed):
            return False
        frame = _getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_OWN):
            frame = frame.f_back
        if frame is not None:  # a thread of the engine's own has none
            name = frame.f_code.co_filename
            if not (backward and name == _ENGINE) and not (changed and name.endswith(_DDP)):
                return False
        try:
            return tensor.untyped_storage().resizable()  # not so another's memory: numpy's, a bytearray
        except NO_STORAGE:
            return False

    def count_only(self, mode: object | None) -> None:
        """Of what is there before, only tensors of this FakeTensorMode; None for all."""
        self.mode = mode

    def counts(self, tensor: torch.Tensor) -> bool:
        return self.mode is None or getattr(tensor, "fake_mode", None) is self.mode

    def counts_any(self, tensor: torch.Tensor) -> bool:
        return self.mode is None or any(map(self.counts, components(tensor)))

    def weigh(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes() if self.fake or storage.device.type != "meta" else 0

    def enter(self, storage: torch.UntypedStorage, before: bool) -> int:
        held = _Held(storage, self._freed)
        held.number = self.count
        held.address = storage._cdata
        held.num_bytes = self.weigh(storage)
        self.count += 1
        self.by_address[held.address] = held
        self.births.append(None if before else self.now())
        if before:
            self.begin.append((held.number, held.num_bytes))
        else:
            self.deltas.append((self.clock(), held.number, held.num_bytes))
        return held.number

    def _freed(self, held: _Held) -> None:
        if self.closed:
            return
        self.by_address.pop(held.address, None)
        if self.births[held.number] is None and torch._C._current_graph_task_id() != -1:
            self.freed.add(held.number)
        if held.num_bytes:
            self.deltas.append((self.clock(), held.number, -held.num_bytes))

    def reread(self, tensor: torch.Tensor) -> int:
        """Look again at the size of a storage that an op may have changed. Gives its number, -1 for none."""
        try:
            return self.reread_storage(tensor.untyped_storage())
        except NO_STORAGE:
            return -1

    def reread_storage(self, storage: torch.UntypedStorage) -> int:
        held = self.by_address.get(storage._cdata)
        if held is None:
            return self.enter(storage, False)
        num_bytes = self.weigh(storage)
        if num_bytes != held.num_bytes:
            self.deltas.append((self.clock(), held.number, num_bytes - held.num_bytes))
            held.num_bytes = num_bytes
        return held.number

    def walk(self) -> list:
        """Enter every live tensor and its gradient as held before. Gives the modules and optimizers found.

        Objects moved to the permanent generation (gc.freeze, as a fork server does with its imports) are not
        looked at: they are older than any tensor of a rank.
        """
        tensors, owners = [], []
        lists: dict[type, list | None] = {}
        for thing in gc.get_objects():
            kind = type(thing)
            if kind not in lists:
                owns = issubclass(kind, torch.nn.Module | torch.optim.Optimizer)
                lists[kind] = tensors if issubclass(kind, torch.Tensor) else owners if owns else None
            found = lists[kind]
            if found is not None:
                found.append(thing)
        for tensor in tensors:
            with contextlib.suppress(Exception):  # a subclass of the learner's that is not whole
                grad = tensor.grad if tensor.is_leaf else None
                for local in components(tensor) + (components(grad) if grad is not None else []):
                    if self.counts(local):
                        self.number_of(local, before=True)
        return owners

    def wrap_resize(self) -> None:
        """Watch UntypedStorage.resize_ (FSDP2 frees that way), which is no op."""
        inherited = torch.UntypedStorage.resize_
        self.resize = torch.UntypedStorage.__dict__.get("resize_")

        def resize_(storage, size):
            self.reread_storage(storage)
            result = inherited(storage, size)
            self.reread_storage(storage)
            return result

        torch.UntypedStorage.resize_ = resize_
        self.wrapped = True

    def close(self) -> None:
        self.closed = True
        self.by_address.clear()
        self.mode = None
        if not self.wrapped:
            return
        if self.resize is not None:
            torch.UntypedStorage.resize_ = self.resize
        elif "resize_" in torch.UntypedStorage.__dict__:
            del torch.UntypedStorage.resize_

    def totals(self) -> tuple[int, int, int]:
        """(begin, end, peak) bytes held."""
        held = peak = begin = sum(num_bytes for _, num_bytes in self.begin)
        for _, _, change in self.deltas:
            held += change
            peak = max(peak, held)
        return begin, held, peak
