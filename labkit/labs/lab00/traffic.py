"""What travelled in exercise 0.4 besides the rows themselves, read from the ledgers.

The ledger has the shape and dtype of every message, so padding, a count that is too large and rows of another
dtype can be told apart. Left out: who may receive, and the order of the questions: `gather`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from labkit.check import evidence
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong

COUNT_BYTES = 8  # one int64
# These tell every rank the counts: not wrong here, but told as such once nothing worse is found.
TELL_ALL = ("all_gather", "all_reduce")


def collectives(observed: Observed, tried: str) -> Verdict | None:
    """Causes "collective": one carried rows. "count_collective": one carried counts in a way not asked for."""
    seen = list(_named(observed))
    limit = COUNT_BYTES * observed.world_size
    rows = [name for name, num_bytes in seen if num_bytes > (COUNT_BYTES if name == "gather" else limit)]
    rows += [name for name in evidence.collectives(observed) if name == "a hidden collective"]
    if rows:
        told = ", ".join(dict.fromkeys(rows))
        sentence = f"the rows travel by send and recv here; {told} was used."
        return wrong("evidence", "collective", sentence, tried, told, "send and recv")
    names = {name for name, _ in seen}
    if "barrier" in names:
        sentence = "no barrier is needed: a send and its recv wait for each other."
        return wrong("evidence", "collective", sentence, tried, "barrier", "send and recv")
    others = sorted(names - {"gather", *TELL_ALL})
    if others:
        sentence = f"the counts travelled by {others[0]}; let each rank send the root one int64, or use torch's gather."
        return wrong("evidence", "count_collective", sentence, tried, ", ".join(others), "send and recv, or gather")
    return None


def _named(observed: Observed) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every collective called. gather_object and its like are two collectives from one place:
    sizes first, then the pickles as bytes.
    """
    for ledger in observed.outcome.ledgers:
        called = [entry for entry in ledger if entry.op not in evidence.P2P and entry.state != "refused"]
        pickles = {
            a.index: f"{b.op}_object" + ("_list" if b.op == "broadcast" else "")
            for a, b in zip(called, called[1:], strict=False)
            if a.place == b.place and b.dtype == "uint8" and a.dtype == "int64"
        }
        follows = {b.index: pickles[a.index] for a, b in zip(called, called[1:], strict=False) if a.index in pickles}
        for entry in called:
            yield pickles.get(entry.index) or follows.get(entry.index) or entry.op, entry.num_bytes


def left_out(observed: Observed, tensors: Sequence[Any], root: int) -> int | None:
    """The first rank without rows that sent the root more messages than the root received from it; else None."""
    ledgers = observed.outcome.ledgers
    for rank, tensor in enumerate(tensors):
        sent = [entry for entry in ledgers[rank] if entry.op == "send" and entry.root == root]
        received = [entry for entry in ledgers[root] if entry.op == "recv" and entry.root == rank]
        if rank != root and not len(tensor) and len(sent) > len(received) and not sent[-1].num_bytes:
            return rank
    return None


def beside_the_rows(observed: Observed, rank: int, tensor: Any, tried: str) -> Verdict | None:
    """A rank sends its rows exactly, and at most one int64 more.

    Causes "padding" (more rows than it has), "dtype_changed" (its rows in a wider dtype), "count_too_large".
    """
    sent = [entry for entry in observed.outcome.ledgers[rank] if entry.op == "send" and entry.state != "refused"]
    num_bytes = sum(entry.num_bytes for entry in sent)
    if num_bytes in (tensor.nbytes, tensor.nbytes + COUNT_BYTES):
        return None
    dtype = str(tensor.dtype).removeprefix("torch.")
    told = ", ".join(f"{entry.num_bytes} bytes ({entry.dtype})" for entry in sent[:4]) + ", ..." * (len(sent) > 4)
    got, expected = f"{len(sent)} messages: {told}", f"{tensor.nbytes} bytes of rows, {COUNT_BYTES} for their count"
    if _holds_rows(sent, tensor, dtype):
        beside = num_bytes - tensor.nbytes
        cause, sentence = (
            "count_too_large" if beside > COUNT_BYTES else "count_not_int64",
            f"the count is one int64, {COUNT_BYTES} bytes; rank {rank} sends {beside} bytes beside its rows.",
        )
    elif tensor.numel() and any(entry.dtype != dtype and _numel(entry) == tensor.numel() for entry in sent):
        other = next(entry.dtype for entry in sent if entry.dtype != dtype and _numel(entry) == tensor.numel())
        cause = "dtype_changed"
        sentence = f"rank {rank} has rows of {dtype} and sends them as {other}: send them as they are."
    else:
        cause, sentence = "padding", f"rank {rank} has {tensor.nbytes} bytes of rows and sends more than that: padding."
    return wrong("evidence", cause, sentence, tried, got, expected)


def _holds_rows(sent: Sequence[Any], tensor: Any, dtype: str) -> bool:
    """Whether the rows are among what was sent: in one message, or each row in one of its own."""
    mine = [entry for entry in sent if entry.dtype == dtype]
    if not tensor.numel():  # padding is what looks like rows
        return not any(len(entry.shape) == tensor.ndim and entry.num_bytes > COUNT_BYTES for entry in mine)
    whole = any(entry.num_bytes == tensor.nbytes for entry in mine)
    row_bytes = tensor.nbytes // len(tensor)
    return whole or (row_bytes and sum(entry.num_bytes == row_bytes for entry in mine) >= len(tensor))


def _numel(entry: Any) -> int:
    numel = 1
    for dim in entry.shape:
        numel *= dim
    return numel
