"""The record of one rank as frozen, picklable data: events in the order they happened, and bytes held.

Times are seconds since the trace began; `RankRecord.began_s` puts ranks of one machine on one clock. Storages
are known by small integers that are never used twice within a record. Left out: tensors and values of any
kind, so that a record can be sent, stored and replayed anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

SPARSE = "_sparse"  # ends the call of an all_reduce of sparse tensors


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen (or custom) op.

    flops: by torch.utils.flop_counter's registry, of the local tensors; 0 where the registry has no formula.
    read_bytes, written_bytes: bytes of the tensors read and written; both 0 for a view.
    reads, writes: storages read and written.
    stream: handle of the CUDA stream it was put on; 0 on a CPU.
    place: "filename:line" of the first frame outside torch, labkit, the standard library and installed packages;
      "" for a view.
    """

    index: int
    name: str
    flops: int
    read_bytes: int
    written_bytes: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    view: bool
    stream: int
    start_s: float
    end_s: float
    place: str


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as it was issued; `end_s` is when the issuing call came back, not when it finished.

    op: the field's name (all_reduce, all_gather, ...); call: the op that torch really issued, with `_sparse` after it
      where its tensors are sparse.
    group, sequence: the group's name and the number of this collective within it, from 0 at the begin of the
      trace: the key that matches it across ranks. ranks: the group's global ranks.
    num_bytes: nccl-tests' S, the full unsharded tensor (see `labkit.cost.traffic`).
    sent_bytes, received_bytes: of this rank, by the stated algorithm (see `labkit.cost.traffic`).
    element_bytes: size of one element; tensors: how many tensors it carries (more than 1 when coalesced).
    root: global rank, or None. reduce_op: "sum", "avg", ... or "".
    blocking: waited for in the same call. in_python: issued through a ProcessGroup method from Python, so that
      a wait for it in Python is seen; otherwise C++ issued it, and waits for it are inferred.
    """

    index: int
    op: str
    call: str
    group: str
    ranks: tuple[int, ...]
    sequence: int
    num_bytes: int
    sent_bytes: int
    received_bytes: int
    element_bytes: int
    tensors: int
    dtype: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    root: int | None
    reduce_op: str
    blocking: bool
    in_python: bool
    stream: int
    start_s: float
    end_s: float
    place: str

    @property
    def is_sparse(self) -> bool:
        """Whether it adds up sparse tensors: every rank gathers what all have. num_bytes: what this rank has."""
        return self.call.endswith(SPARSE)


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """One send or recv. peer: global rank (None: from any source, and never known).

    order: its number among the messages between this rank and that peer in this direction, from 0: with the
    pair of ranks it is the key that matches a send with its recv where tags are equal.
    """

    index: int
    op: str
    call: str
    group: str
    ranks: tuple[int, ...]
    peer: int | None
    tag: int
    order: int
    num_bytes: int
    dtype: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    blocking: bool
    in_python: bool
    stream: int
    start_s: float
    end_s: float
    place: str

    @property
    def sent_bytes(self) -> int:
        return self.num_bytes if self.op == "send" else 0

    @property
    def received_bytes(self) -> int:
        return self.num_bytes if self.op == "recv" else 0


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank waits for communication number `of` (an event index). how:

    "call": a wait in Python (Work.wait) or the op wait_tensor, `blocking` when within the issuing call itself.
    "inferred": C++ issued it; an op touched its bytes, so C++ had waited by then.
    "region": C++ issued it, nothing touched its bytes; taken as waited for at the end of the trace.
    "touched": Python issued it and its result was touched before any wait: a race, unless a future was used.
    """

    index: int
    of: int
    how: str
    blocking: bool
    start_s: float
    end_s: float
    place: str


Event = Op | Collective | PointToPoint | Wait


@dataclass(frozen=True, slots=True)
class Delta:
    """Bytes held change by `num_bytes` as storage `storage` is made, resized or freed, at event `index`.

    A storage freed between two events carries the index of the later one.
    """

    index: int
    storage: int
    num_bytes: int


@dataclass(frozen=True)
class RankRecord:
    """What one rank did in a traced region.

    begin: storages held on entry, as (storage, bytes). deltas: every change since, in order.
    begin_bytes, end_bytes, peak_bytes: bytes held on entry, at the end, and at most in between.
    kinds: (storage, kind) for every storage, the strongest it ever had: see `labkit.record.kinds`.
    began_s: reading of the machine's monotonic clock on entry.
    modules: (storage, qualified name of the module it belongs to or was made in) where one is known.
    """

    rank: int
    world_size: int
    events: tuple[Event, ...]
    begin: tuple[tuple[int, int], ...]
    deltas: tuple[Delta, ...]
    begin_bytes: int
    end_bytes: int
    peak_bytes: int
    kinds: tuple[tuple[int, str], ...]
    began_s: float
    time_s: float
    modules: tuple[tuple[int, str], ...] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(event for event in self.events if isinstance(event, Op))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(event for event in self.events if isinstance(event, Collective))

    @property
    def messages(self) -> tuple[PointToPoint, ...]:
        return tuple(event for event in self.events if isinstance(event, PointToPoint))

    @property
    def communications(self) -> tuple[Collective | PointToPoint, ...]:
        """Collectives and messages together, in the order they were issued."""
        return tuple(event for event in self.events if isinstance(event, Collective | PointToPoint))

    @property
    def waits(self) -> tuple[Wait, ...]:
        return tuple(event for event in self.events if isinstance(event, Wait))

    @property
    def flops(self) -> int:
        return sum(op.flops for op in self.ops)

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank sent, collectives by their stated algorithm and messages as they are."""
        return sum(event.sent_bytes for event in self.communications)

    @property
    def received_bytes(self) -> int:
        return sum(event.received_bytes for event in self.communications)

    @property
    def never_waited(self) -> tuple[Collective | PointToPoint, ...]:
        """Communications with no wait of any kind: still in flight when the trace ended, as far as it can tell."""
        waited = {wait.of for wait in self.waits}
        return tuple(event for event in self.communications if event.index not in waited)

    @property
    def held_bytes(self) -> tuple[tuple[int, int], ...]:
        """(event index, bytes held from then on), one pair per change; starts with (0, begin_bytes)."""
        held, line = self.begin_bytes, [(0, self.begin_bytes)]
        for delta in self.deltas:
            held += delta.num_bytes
            line.append((delta.index, held))
        return tuple(line)
