"""Trace: everything a rank does between entering and leaving a `with`, as a RankRecord.

A dispatch mode sees every ATen op and every collective, also those that DDP's C++ reducer, FSDP2, DTensor and
DeepSpeed issue. DTensor and other tensor subclasses are passed through, so that the local ops behind them
are what is recorded. Left out: values of any kind, and time on a GPU, where an op returns before it has run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.record import calls
from labkit.record.aside import Aside, fake_mode
from labkit.record.build import build_record
from labkit.record.components import arguments, collect, components, parts
from labkit.record.known import Known, address_of, facts_of, learn, stored
from labkit.record.labels import Labels
from labkit.record.memory import Holdings
from labkit.record.places import Places
from labkit.record.running import Running
from labkit.record.waits import Pending, Works
from labkit.record.zero_engines import tensors_of

_now = time.perf_counter_ns
_PLAIN = torch._C._disabled_torch_dispatch_impl


class _Mode(TorchDispatchMode):
    """Writes raw rows; `build` turns them into events afterwards, outside the timed region."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default imports torch._dynamo, a second at the first op

    def __init__(self, fake: bool = False):
        super().__init__()
        self.fake = fake
        self.aside = Aside()
        self.known: dict = {}
        self.flops: dict = {}
        self.on_gpu = torch.cuda.is_available()
        self.rows: list[tuple] = []
        self.running = Running()
        self.holdings = Holdings(lambda: len(self.rows), self.running.now, fake)
        self.pending = Pending()
        self.places = Places()
        self.works = Works(self.waited)
        self.blocking: set[int] = set()
        self.sources: dict[int, int] = {}
        self.in_python: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.aside.depth or func.namespace == "prim":  # a FakeTensor is asked for its device
            return func(*args, **(kwargs or {}))
        for kind in types:
            if kind.__name__ == "FakeTensor":
                if self.fake:
                    continue
                return func(*args, **(kwargs or {}))  # shapes only (DTensor asks so how to shard): nothing happens
            if kind.__torch_dispatch__ is not _PLAIN:
                return NotImplemented  # DTensor and the like: its own dispatch brings the local ops back here
        kwargs = kwargs or {}
        known = self.known.get(func)
        if known is None:
            known = self.known[func] = learn(func)
        if known.op:
            return self.communicate(known, func, args, kwargs)
        if known.composite:
            # Seen whole only below autograd (inference_mode); its parts have the FLOP formulas.
            with self:
                return func.decompose(*args, **kwargs)
        return self.compute(known, func, args, kwargs)

    def compute(self, known: Known, func, args: tuple, kwargs: dict):
        given = arguments(args, kwargs)
        if given and given[0].is_meta and not self.fake:
            return func(*args, **kwargs)
        written = self.written(known, args, kwargs) if known.mutable_names else []
        if self.pending.by_tensor and known.looks and not self.works.inside:
            self.join_whole(given, known.joins)
        reads = self.read(given, written)
        if self.works.inside:
            out = func(*args, **kwargs)
            self.write(known, out, written, reads, [])
            return out
        if self.pending.by_storage and not known.view:
            self.join(given, reads, known.joins)
        start = _now()
        out = func(*args, **kwargs)
        end = _now()
        if type(out).__name__ == "FakeTensor" and not self.fake:  # made under a FakeTensorMode
            return out
        writes: list[int] = []
        read_bytes = written_bytes = 0
        view = known.view
        if not view:
            written_bytes = self.write(known, out, written, reads, writes)
            view = not writes and not known.mutable_names and bool(given)  # _unsafe_view and the like
            if not view:
                for tensor in given:
                    read_bytes += tensor.nbytes
        flops = self.flops_of(known, args, kwargs, out) if known.flops is not None else 0
        stream = self.stream() if self.on_gpu else 0
        here = None if view else self.places.here(2)  # the dearest part of a row, and a view needs none
        self.rows.append(
            ("op", known.name, flops, read_bytes, written_bytes, reads, writes, view, stream, start, end, here)
        )
        return out

    def read(self, given: list, written: list) -> list[int]:
        """Numbers of the storages of an op's arguments, among which components take the place of what has none.

        A storage never seen counts as made now, but for what `Holdings.was_there` tells.
        """
        by_address, numbers = self.holdings.by_address, []
        for tensor in given:
            address = address_of(tensor)
            held = by_address.get(address)
            if held is None:
                if not address and len(found := parts(given)) > len(given):
                    given[:] = found
                    return self.read(given, written)
                changed = any(address == address_of(each) for each in parts(written))
                old = not self.works.inside and self.holdings.was_there(tensor, changed)  # inside: gloo's own buffer
                numbers.append(self.holdings.number_of(tensor, before=old))
            else:
                numbers.append(held.number)
        return numbers

    def write(self, known: Known, out, written: list, reads: list[int], writes: list[int]) -> int:
        """Enter what an op made or changed; numbers go to `writes`. Gives the bytes written."""
        holdings, num_bytes = self.holdings, 0
        for number, tensor in stored(written, holdings.reread):
            writes.append(number)
            num_bytes += tensor.nbytes
        if known.gives_written:
            return num_bytes
        made: list[torch.Tensor] = []
        collect(out, made)
        for number, tensor in stored(made, holdings.number_of):
            if number < 0 or (number not in reads and number not in writes):
                writes.append(number)
                num_bytes += tensor.nbytes
        return num_bytes

    def flops_of(self, known: Known, args: tuple, kwargs: dict, out) -> int:
        """By the registry's formula, worked out once per op and shapes."""
        key = (known.name, *[a.shape if isinstance(a, torch.Tensor) else a for a in args])
        if kwargs:
            return known.flops(*args, **kwargs, out_val=out)
        try:
            flops = self.flops.get(key)
        except TypeError:  # a list among the arguments (convolutions)
            return known.flops(*args, out_val=out)
        if flops is None:
            flops = self.flops[key] = known.flops(*args, out_val=out)
        return flops

    def written(self, known: Known, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for position in known.mutable:
            if position < len(args):
                collect(args[position], found)
        for name in known.mutable_names:
            if name in kwargs:
                collect(kwargs[name], found)
        return found

    def join(self, given: list, numbers: list[int], by_call: bool) -> None:
        """Enter a wait for every communication whose result is about to be touched."""
        for tensor, number in zip(given, numbers, strict=True):
            if number in self.pending.by_storage:
                self.enter_waits(self.pending.touched(number, tensor), by_call)

    def join_whole(self, given: list, by_call: bool) -> None:
        """The same for tensors without a storage of their own; components that they have been given are made now."""
        for tensor, indexes in self.pending.written_whole(given):
            self.enter_waits(indexes, by_call)
            for part in components(tensor):
                self.holdings.number_of(part)

    def enter_waits(self, indexes: list[int], by_call: bool) -> None:
        for index in filter(self.pending.drop, indexes):
            how = "call" if by_call else "touched" if index in self.in_python else "inferred"
            now = _now()
            self.rows.append(("wait", index, how, False, now, now, self.places.here(4)))

    def communicate(self, known: Known, func, args: tuple, kwargs: dict):
        call = calls.describe(func, args, kwargs)
        number_of = self.holdings.number_of
        if self.pending.by_tensor:
            self.join_whole(call.inputs + call.outputs, False)
        inputs, outputs = parts(call.inputs), parts(call.outputs)
        for tensor in outputs:
            if self.holdings.known_number(tensor) is None:
                number_of(tensor, before=self.holdings.was_there(tensor, True))
        reads = [number_of(t) for t in inputs]
        if self.pending.by_storage:
            self.join(inputs, reads, False)
            self.join(outputs, [number_of(t) for t in outputs], False)
        gives = func.namespace == calls.FUNCTIONAL and not call.outputs and call.op != "send"
        # Before, where that can be: gloo gives a sparse tensor the components of the result while this goes on.
        described = () if gives else facts_of(call)
        start = _now()
        out = func(*args, **kwargs)
        end = _now()
        if gives:
            collect(out, call.outputs)
            described, outputs = facts_of(call), parts(call.outputs)
        writes = [number_of(t) for t in outputs]
        index = len(self.rows)
        if self.works.issued is not None:
            self.works.issued.append(index)
        if self.works.issued is not None or func.namespace == calls.FUNCTIONAL:
            self.in_python.add(index)
        self.pending.add(index, list(zip(writes, outputs, strict=True)), call.outputs)
        place = self.places.here(2)
        self.rows.append(("comm", *described, reads, writes, self.stream(), start, end, place))
        return out

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.on_gpu and torch.cuda.is_initialized() else 0

    def waited(self, indexes: list[int], blocking: bool, start: int, end: int, work) -> None:
        place = self.places.here(3)
        for index in indexes:
            if not self.pending.drop(index):
                continue  # a second wait for the same
            if blocking:
                self.blocking.add(index)
            self.rows.append(("wait", index, "call", blocking, start, end, place))
            if self.rows[index][2] == "recv_any_source":
                self.sources[index] = work._source_rank()


def _rank() -> tuple[int, int] | None:
    """(rank, world size), None without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def _leave(mode: _Mode) -> None:
    with contextlib.suppress(RuntimeError):  # somebody has popped the mode; `is_innermost` tells
        mode.__exit__(None, None, None)


class Trace:
    """`with Trace() as t:` records what this process does until the end of the block; then `t.record` is a
    frozen RankRecord. Works in a rank and without any process group. Not re-entrant; one at a time.

    optimizers: objects that keep optimizer state and are no torch.optim.Optimizer (a learner's own ZeRO): whatever
    tensors they hold, in attributes of theirs or of what they hold, and nothing else explains, is labelled "optimizer".
    fake: tensors without memory (of a FakeTensorMode, or on the meta device) count as if they had it, so that a model
    that no machine here could hold is recorded with torch's fake process group (see `labkit.model.fake`). Within a
    FakeTensorMode what was there before counts only if it is of that mode.
    Raises ValueError on entry for one of `optimizers` that holds no tensor, RuntimeError when `record` is read before
    the block has ended.
    """

    def __init__(self, optimizers: Iterable[object] = (), fake: bool = False):
        self._optimizers = tuple(optimizers)
        self._fake = fake
        self._mode: _Mode | None = None
        self._labels: Labels | None = None
        self._record = None
        self._ended = False

    def __enter__(self) -> Trace:
        for owner in self._optimizers:
            if not tensors_of(owner):
                raise ValueError(
                    f"optimizers: a {type(owner).__name__} that holds no tensor; an object whose attributes are "
                    "tensors, or lists and dicts of them, would do (a torch.optim.Optimizer need not be given)"
                )
        self._mode = mode = _Mode(self._fake)
        self._labels = labels = Labels(mode.holdings, mode.running, self._optimizers)
        with contextlib.ExitStack() as undo:  # whatever happens, from here to the end of the block
            undo.callback(mode.holdings.close)
            undo.callback(labels.close)
            undo.callback(mode.aside.close)
            if self._fake:
                mode.aside.watch()
                mode.holdings.count_only(fake_mode())
            labels.watch(mode.holdings.walk())
            mode.holdings.wrap_resize()
            undo.callback(mode.works.unwrap)
            mode.works.wrap()
            mode.__enter__()
            undo.callback(_leave, mode)
            self._undo = undo.pop_all()
        self._rank = _rank()
        self._start = _now()
        return self

    def __exit__(self, *error) -> None:
        self._end = _now()
        self._ended = True
        self._optimizers = ()
        self._rank = _rank() or self._rank  # of a group that was made within, or is gone by now
        self._undo.close()

    def is_innermost(self) -> bool:
        """Whether, within the block, the recorder is on and no other dispatch mode lies over it."""
        depth = torch._C._len_torch_dispatch_stack()
        return depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is self._mode

    def wrappers_in_place(self) -> bool:
        """Whether, within the block, the ProcessGroup and Work methods are still those the trace has put there."""
        return self._mode.works.patches.in_place()

    @property
    def record(self):
        if not self._ended:
            raise RuntimeError("the record is there when the `with Trace()` block has ended")
        if self._record is None:
            rank, world_size = self._rank or (0, 1)
            self._record = build_record(self._mode, self._labels, rank, world_size, self._start, self._end)
            self._mode = self._labels = None  # raw rows are as large as the record
        return self._record
