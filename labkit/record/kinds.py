"""What every storage was for, and whose: worked out from labels, events and births once a trace has ended.

The strongest counts: parameter, gradient, optimizer, buffer, communication, activation, temporary. Weaker than what
communication tells is that an optimizer holds a tensor: it holds weights and buckets, too. Left out: values; a copy is
known by the op that made it, and so is padding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from labkit.record.events import Collective, Delta, Event, Op, PointToPoint
from labkit.record.labels import ORDER
from labkit.record.running import AGAIN, APART, BACKWARD, FORWARD

KINDS = ("parameter", "gradient", "optimizer", "buffer", "communication", "activation", "temporary")
# Ops that put the same numbers elsewhere.
_COPIES = {
    "aten.copy_", "aten.cat", "aten.cat.out", "aten.clone", "aten._to_copy", "aten._foreach_copy_",
    "aten.split_with_sizes_copy", "aten.split_with_sizes_copy.out", "fsdp.all_gather_copy_in",
    "fsdp.split_with_sizes_copy", "fsdp.chunk_cat", "aten._chunk_cat", "aten._chunk_cat.out", "aten.constant_pad_nd",
}  # fmt: skip
# Ops that give as many numbers, scaled: what a mean needs before or after a collective.
_SCALES = {"aten.div.Tensor", "aten.div.Scalar", "aten.mul.Tensor", "aten.mul.Scalar"}
# Ops that make padding.
_FILLS = {
    "aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.empty", "aten.new_empty", "aten.full", "aten.new_full",
    "aten.zero_", "aten.fill_.Scalar",
}  # fmt: skip


def kinds_of(
    labels: dict[int, int],
    births: Sequence[tuple | None],
    begin: Sequence[tuple[int, int]],
    deltas: Sequence[Delta],
    events: Sequence[Event],
    buckets: Iterable[int] = (),
    given: Iterable[int] = (),
    freed: Collection[int] = (),
) -> tuple[tuple[int, str], ...]:
    """(storage, kind) for every storage of a record. labels: rank in ORDER; births: what `Running.now` gave.

    buckets: storages that are for communication, though a gradient may have lain in them. given: that an optimizer
    holds or steps, whatever for; one that is gathered from is a parameter. freed: of those that were there before the
    trace, the ones freed in a backward.
    """
    kinds = {storage: ORDER[rank] for storage, rank in labels.items()}
    kinds |= dict.fromkeys(buckets, "communication")
    given = set(given)
    gathers = (event for event in events if isinstance(event, Collective) and event.op == "all_gather")
    gathered = {storage for event in gathers for storage in event.reads}
    for storage in given & gathered:
        if kinds.get(storage, "optimizer") == "optimizer":
            kinds[storage] = "parameter"
    _follow_copies(kinds, events)
    for event in events:
        if isinstance(event, Collective | PointToPoint):
            for storage in (*event.reads, *event.writes):
                kinds.setdefault(storage, "communication")
    for storage in given:
        kinds.setdefault(storage, "optimizer")
    for storage in kept_for_backward(births, begin, deltas, freed, _used_with_grad(births, events)):
        kinds.setdefault(storage, "activation")
    for storage in range(len(births)):
        kinds.setdefault(storage, "temporary")
    return tuple(sorted(kinds.items()))


def _follow_copies(kinds: dict[int, str], events: Sequence[Event]) -> None:
    """What an all-gather makes of parameters are parameters, what a reduce-scatter makes of gradients is a gradient.

    So are copies of the former, and copies of gradients, but not the buckets that go into a collective.
    """
    talks = [event for event in events if isinstance(event, Collective | PointToPoint)]
    buckets = {storage for event in talks for storage in (*event.reads, *event.writes)}
    copied: dict[int, str] = {}  # copies of parameters and of gradients, with a label of their own or not
    padding: set[int] = set()
    for event in events:
        if isinstance(event, Op) and event.name not in _COPIES and event.name not in _SCALES:
            (padding.update if event.name in _FILLS else padding.difference_update)(event.writes)
            continue
        sources = set(getattr(event, "reads", ())) - set(getattr(event, "writes", ()))
        found = {copied.get(s) or kinds.get(s) for s in sources if s not in padding or s in copied or s in kinds}
        padding.difference_update(getattr(event, "writes", ()))
        if len(found) != 1:
            continue
        (kind,) = found
        if isinstance(event, Op):
            if kind == "gradient" or (kind in ("parameter", "gathered") and event.name in _COPIES):
                copied.update(dict.fromkeys(event.writes, kind))
            for storage in event.writes if event.name in _COPIES else ():
                if kind == "gathered" or (kind == "gradient" and storage not in buckets):
                    kinds.setdefault(storage, "parameter" if kind == "gathered" else kind)
        elif isinstance(event, Collective):
            _follow(event, kind, kinds, copied)


def _follow(event: Collective, kind: str | None, kinds: dict[int, str], copied: dict[int, str]) -> None:
    """Label what a collective makes of storages of one kind."""
    made = [storage for storage in event.writes if storage not in event.reads]
    if event.op == "all_gather" and kind in ("parameter", "gathered"):
        for storage in made:
            kinds.setdefault(storage, "parameter")
            copied[storage] = "gathered"
    elif event.op == "reduce_scatter" and kind == "gradient":
        for storage in made:
            kinds.setdefault(storage, "gradient")
            copied[storage] = "gradient"


def _used_with_grad(births: Sequence[tuple | None], events: Sequence[Event]) -> set[int]:
    """Storages that an op in a forward with grad has read, also those that an autograd.Function made without grad."""
    return {
        storage
        for event in events
        if isinstance(event, Op) and any(births[made] and births[made][0] == FORWARD for made in event.writes)
        for storage in event.reads
    }


def kept_for_backward(
    births: Sequence[tuple | None],
    begin: Sequence[tuple[int, int]],
    deltas: Sequence[Delta],
    freed: Collection[int] = (),
    used: Collection[int] = (),
) -> set[int]:
    """Storages that were made in a forward, or in one done again, and still held when a backward began.

    One that is held when the trace ends counts if no backward began since it was made, but not if it was made without
    grad and is not among those used with it; one that was there before, if it is among those freed within a backward.
    What stays for good after a backward was not kept for it.
    """
    waiting: set[int] = set()  # made in a forward, no backward since
    held: set[int] = set()  # of those, held when a backward began
    kept: set[int] = set()
    apart: set[int] = set()  # made without grad in a module's run, as a reentrant checkpoint does
    before = {storage for storage, _ in begin}
    seen: set[int] = set()
    for delta in deltas:
        storage = delta.storage
        if delta.num_bytes > 0 and storage not in seen and storage not in before:
            seen.add(storage)
            part, module, _ = births[storage]
            if part in (FORWARD, AGAIN):
                waiting.add(storage)
            elif part == APART and module >= 0:
                waiting.add(storage)
                apart.add(storage)
            elif part == BACKWARD and waiting:
                held |= waiting
                waiting = set()
        elif delta.num_bytes < 0:
            waiting.discard(storage)
            if storage in held or storage in freed:
                kept.add(storage)
    return kept | (waiting - (apart - set(used)))


def owners_of(
    labels_owners: dict[int, int], births: Sequence[tuple | None], module_of, names: Sequence[str]
) -> tuple[tuple[int, str], ...]:
    """(storage, module's qualified name) for those whose module is known: the one it belongs to, or in whose run it was
    made. None is for what belongs to several.
    """
    found = []
    for storage, birth in enumerate(births):
        module = labels_owners.get(storage)
        if module is None:
            module = module_of(birth)
        if module >= 0:
            found.append((storage, names[module]))
    return tuple(found)
