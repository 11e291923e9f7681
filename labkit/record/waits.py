"""Which wait belongs to which communication: ProcessGroup methods and Work.wait are wrapped for a while.

Every ProcessGroup method that gives a Work is wrapped, so that the Work can be mapped to the communications
issued within the call, and Work.wait on the class, so that a wait is known wherever it is made from Python.
What was on the class before (the ledger's wrappers, or nothing) is nested and put back exactly. Left out:
waits in C++, which `trace` infers from what is touched.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from sys import _getframe

import torch
import torch.distributed as dist

from labkit.record.components import is_strided

_GIVES_WORK = "_distributed_c10d.Work", "c10d::Work"
# For wrappers that carry no docstring; the docstrings name what a newer torch has besides.
_KNOWN = (
    "allreduce allreduce_coalesced broadcast reduce allgather _allgather_base allgather_coalesced "
    "allgather_into_tensor_coalesced all_gather_single all_gather_single_coalesced reduce_scatter "
    "_reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced "
    "reduce_scatter_tensor_coalesced gather scatter alltoall alltoall_base all_to_all_single barrier send "
    "recv recv_anysource _end_coalescing"
).split()


def issuing_methods() -> list[str]:
    """Names of the ProcessGroup methods that give a Work."""
    found = []
    for name, method in dist.ProcessGroup.__dict__.items():
        doc = getattr(method, "__doc__", None) or ""
        if name in _KNOWN or any(f"-> {text}" in doc.replace("torch._C.", "") for text in _GIVES_WORK):
            found.append(name)
    return found


class Patches:
    """Attributes of classes replaced for a while, and put back from what the class's own dict held."""

    def __init__(self):
        self.saved: list[tuple[type, str, object, object]] = []

    def put(self, cls: type, name: str, replacement: object) -> None:
        self.saved.append((cls, name, cls.__dict__.get(name, self), replacement))
        setattr(cls, name, replacement)

    def undo(self) -> None:
        for cls, name, before, _ in reversed(self.saved):
            if before is self:
                delattr(cls, name)
            else:
                setattr(cls, name, before)
        self.saved.clear()

    def in_place(self) -> bool:
        """Whether every replacement is still there, untouched."""
        return all(cls.__dict__.get(name) is now for cls, name, _, now in self.saved)


class Works:
    """Maps a Work to the event indexes of what it carries.

    issued: indexes of the communications issued within the ProcessGroup call that is going on; None outside.
    waited(indexes, blocking, start_ns, end_ns, work): told of every wait that came back.
    """

    def __init__(self, waited: Callable):
        self.waited = waited
        self.issued: list[int] | None = None
        self.unclaimed: list[int] = []
        self.by_work: dict[int, tuple[weakref.ref, list[int]]] = {}
        self.patches = Patches()
        self.inside = 0

    def wrap(self) -> None:
        if not dist.is_available():
            return
        for name in issuing_methods():
            self.patches.put(dist.ProcessGroup, name, self._issuing(getattr(dist.ProcessGroup, name), name))
        for name in ("wait", "synchronize"):
            self.patches.put(dist.Work, name, self._waiting(getattr(dist.Work, name)))

    def unwrap(self) -> None:
        self.patches.undo()
        self.by_work.clear()

    def _issuing(self, original: Callable, name: str) -> Callable:
        def issue(*args, **kwargs):
            outer, self.issued = self.issued, []
            try:
                work = original(*args, **kwargs)
            finally:
                mine, self.issued = self.issued, outer
            if name == "_end_coalescing":  # its Work stands for all since _start_coalescing
                mine, self.unclaimed = mine + self.unclaimed, []
            if work is None:
                self.unclaimed += mine
            elif mine:
                self._map(work, mine)
            return work

        return _like(issue, original)

    def _map(self, work: dist.Work, indexes: list[int]) -> None:
        key = id(work)
        self.by_work[key] = (weakref.ref(work, lambda _: self.by_work.pop(key, None)), indexes)

    def _waiting(self, original: Callable) -> Callable:
        def wait(work, *args, **kwargs):
            start = time.perf_counter_ns()
            self.inside += 1  # ops the backend runs in here (gloo copies results) are not the program's
            try:
                result = original(work, *args, **kwargs)
            finally:
                self.inside -= 1
            reference, indexes = self.by_work.get(id(work), (None, None))
            if indexes is not None and reference() is work:
                self.waited(indexes, _within_call(), start, time.perf_counter_ns(), work)
            return result

        return _like(wait, original)


def _within_call() -> bool:
    """Whether torch.distributed itself waits, so within the call that issued."""
    frame = _getframe(2)
    own = dist.distributed_c10d.__file__
    while frame is not None:
        name = frame.f_code.co_filename
        if name == own:
            return True
        if "labkit" not in name:  # the ledger's wrapper lies between
            return False
        frame = frame.f_back
    return False


def unrecorded() -> torch._C._DisableTorchDispatch:
    """A context in which ops are not recorded, as none is on a thread of the backend's own."""
    return torch._C._DisableTorchDispatch()


def _like(wrapper: Callable, original: Callable) -> Callable:
    wrapper.__name__ = getattr(original, "__name__", wrapper.__name__)
    wrapper.__doc__ = getattr(original, "__doc__", None)
    return wrapper


class Pending:
    """Communications still in flight, by the storage they write and the byte range within it.

    by_tensor: those that write a tensor without a storage of its own, also by the tensor's id: what its components
    are when it is read, a backend decides (gloo gives a sparse tensor new ones).
    """

    def __init__(self):
        self.by_storage: dict[int, list[tuple[int, int, int]]] = {}
        self.storages_of: dict[int, tuple[int, ...]] = {}
        self.by_tensor: dict[int, tuple[weakref.ref, set[int]]] = {}

    def add(self, index: int, written: list[tuple[int, torch.Tensor]], tensors: list[torch.Tensor]) -> None:
        """written: (storage, strided tensor) of what it writes, a sparse tensor by its components. tensors: whole."""
        for storage, tensor in written:
            self.by_storage.setdefault(storage, []).append((*byte_range(tensor), index))
        self.storages_of[index] = tuple(storage for storage, _ in written)
        for tensor in tensors:
            if not is_strided(tensor):
                key = id(tensor)
                if key not in self.by_tensor:
                    self.by_tensor[key] = weakref.ref(tensor, lambda _, key=key: self.by_tensor.pop(key, None)), set()
                self.by_tensor[key][1].add(index)

    def written_whole(self, given: list[torch.Tensor]) -> list[tuple[torch.Tensor, list[int]]]:
        """Those of these tensors that are being written, with the indexes of the communications."""
        found = ((tensor, self.by_tensor.get(id(tensor))) for tensor in given)
        return [(tensor, sorted(entry[1])) for tensor, entry in found if entry is not None]

    def touched(self, storage: int, tensor: torch.Tensor) -> list[int]:
        """Indexes of the communications that write bytes of `tensor`."""
        low, high = byte_range(tensor)
        return [index for start, end, index in self.by_storage.get(storage, ()) if start < high and low < end]

    def drop(self, index: int) -> bool:
        """Communication `index` is finished. False when it was so already."""
        storages = self.storages_of.pop(index, None)
        if storages is None:
            return False
        for storage in storages:
            left = [each for each in self.by_storage.get(storage, ()) if each[2] != index]
            if left:
                self.by_storage[storage] = left
            else:
                self.by_storage.pop(storage, None)
        for key, (_, indexes) in list(self.by_tensor.items()):
            indexes.discard(index)
            if not indexes:
                self.by_tensor.pop(key, None)
        return True


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First and past-the-last byte of a strided tensor within its storage."""
    if tensor.is_nested:
        return 0, tensor.untyped_storage().nbytes()
    size = tensor.element_size()
    low = tensor.storage_offset() * size
    if tensor.numel() == 0:
        return low, low
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (reach + 1) * size
