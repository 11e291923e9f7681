"""What ranks were seen to send, wait for and hold in exercise 2.3, beside the values that came back.

Bytes held are those of a rank's record, at their peak over the whole call: where and how the model was called does not
count then. Left out: what may be sent (`accumulate`); two graphs at once, or three of few tokens, which pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.record.events import Op, RankRecord

# Counts and losses: a few numbers, also as pickled objects or padding of chunks; tokens of a microbatch are more.
SCALAR_BYTES = 1024
_EMBEDS = "aten.embedding"
# What may be held at the peak: parameters made for the call, .grad, copies of it; a graph in its backward, and as much
# again for losses in float64. Six graphs of twelve are more.
GRADIENTS = 4
LOGITS = 12
_SUMS = ("all_reduce", "reduce", "reduce_scatter")
_NARROW = ("bfloat16", "float16")


def ledger_bytes(ledger: Sequence[Any]) -> int:
    """Bytes of the tensors that a rank gave to all_reduce."""
    return sum(entry.num_bytes for entry in ledger if entry.op == "all_reduce" and entry.state != "refused")


def uses(fn: Any, name: str) -> bool:
    """Whether a function, or one beside it, names an attribute or global `name`."""
    beside = getattr(fn, "__globals__", {}).values()
    return any(_names(getattr(each, "__code__", None), name) for each in (fn, *beside))


def _names(code: Any, name: str) -> bool:
    if not hasattr(code, "co_names"):
        return False
    return name in code.co_names or any(_names(each, name) for each in code.co_consts)


def not_waited(record: RankRecord) -> str | None:
    """The op of the first communication whose result was touched, or left, without a wait for it; None for none."""
    called = {wait.of for wait in record.waits if wait.how == "call"}
    raced = {wait.of for wait in record.waits if wait.how == "touched"} - called
    raced |= {event.index for event in record.never_waited}
    return next((event.op for event in record.communications if event.index in raced), None)


def explained(cause: str, sentence: str, record: RankRecord | None, gradient_bytes: int) -> tuple[str, str]:
    """(cause, sentence) of a wrong gradient, with what the record knows of it."""
    events = record.communications if record is not None else ()
    if cause == "not_reduced" and _by_op(events).get("all_reduce", 0) > 0.9 * gradient_bytes:
        return cause, f"{sentence} A sum over ranks was made: was it of .grad, and copied back to it?"
    if cause == "nearly_right" and any(event.dtype in _NARROW for event in events):
        return "precision_lost", "the gradient is nearly right: it was sent in a narrower dtype."
    return cause, sentence


def _by_op(events: Sequence[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for event in events:
        found[event.op] = found.get(event.op, 0) + event.num_bytes
    return found


def due_bytes(record: RankRecord | None, gradient_bytes: int, world_size: int) -> float:
    """Bytes that a rank sends for one gradient: a ring's 2(n-1)/n of it; for a reduce and a broadcast one each."""
    by_op = _by_op(record.communications) if record is not None else {}
    whole = range(int(0.9 * gradient_bytes), gradient_bytes + SCALAR_BYTES)
    if by_op.get("reduce", 0) in whole and by_op.get("broadcast", 0) in whole:
        return 2 * gradient_bytes
    return 2 * (world_size - 1) / world_size * gradient_bytes


def too_much(record: RankRecord, gradient_bytes: int, microbatches: int, surplus: float) -> tuple[str, str]:
    """(cause, sentence) for a rank that sent more than one gradient. surplus: bytes beyond that."""
    by_op = _by_op(record.communications)
    if _parameters_sent(record, gradient_bytes):
        return "parameters_sent", "the parameters are sent too, at every call, as when DDP is made anew."
    if by_op.get("all_gather", 0) >= gradient_bytes and "reduce_scatter" not in by_op:
        sentence = "every rank's gradient goes to every rank: all_reduce sends less than 2 of them, however many ranks."
        return "gathered", sentence
    reduced = by_op.get("all_reduce", 0) / gradient_bytes
    if microbatches > 1 and reduced > microbatches - 0.1:
        return "every_microbatch", "gradients are communicated in every microbatch: add them up, send them once."
    if any(event.dtype == "float64" for event in record.communications if event.num_bytes > 64):
        return "sent_as_float64", "gradients are sent as float64: twice the bytes for what was float32."
    if surplus < gradient_bytes / 2:
        sentence = "more than scalars is sent beside the gradient: a loss and a count are two numbers."
        return "more_than_scalars", sentence
    return "too_many_bytes", "gradients are communicated more than once per call."


def _parameters_sent(record: RankRecord, gradient_bytes: int) -> bool:
    """Broadcasts of a gradient's size before the first forward, or from rank 0 beside an all_reduce of one."""
    first = min((op.index for op in _forwards(record)), default=None)
    told = [event for event in record.communications if event.op == "broadcast"]
    early = sum(event.num_bytes for event in told if first is not None and event.index < first)
    reduced = _by_op(record.communications).get("all_reduce", 0)
    of_one = sum(event.num_bytes for event in told) >= gradient_bytes and {event.root for event in told} == {0}
    return early >= gradient_bytes or (of_one and reduced >= 0.9 * gradient_bytes)


def gathered_by_one(record: RankRecord, gradient_bytes: int) -> tuple[str, str] | None:
    """Gradients that one rank gathers and adds alone."""
    if record is None or _by_op(record.communications).get("gather", 0) < gradient_bytes / 2:
        return None
    return "gathered", "one rank gathers all gradients and adds them alone: all_reduce shares both among the ranks."


def more_than_sums(record: RankRecord, gradient_bytes: int, world_size: int, scalars: int) -> bool:
    """Whether tokens could have come with what was sent: more bytes than a gradient's and scalars, or by other ops."""
    told = sum(event.sent_bytes for event in record.communications if event.op not in _SUMS)
    return told > scalars or record.sent_bytes > due_bytes(record, gradient_bytes, world_size) + scalars


def all_at_once(record: RankRecord, tokens: int, hidden: int) -> tuple[str, str, str, str] | None:
    """A forward of more tokens than the largest microbatch has. tokens: of that one; hidden: the model's width."""
    forwards = [op.written_bytes // (4 * hidden) for op in _forwards(record)]
    if not forwards or max(forwards) <= tokens:
        return None
    sentence = "microbatches went through the model together: their activations are all held at once."
    return "one_large_batch", sentence, f"a forward of {max(forwards)} tokens", f"at most {tokens}, one microbatch"


def graphs_kept(record: RankRecord, gradient_bytes: int, tokens: int) -> tuple[str, str, str, str] | None:
    """Whether graphs of several microbatches were there at once. tokens: of a microbatch, over a byte's 256 values.

    Measured in logits (tokens * 256 * 4 bytes): a graph keeps 2.3 of them, its backward holds 5 for a moment.
    """
    held = record.peak_bytes - record.begin_bytes
    most = GRADIENTS * gradient_bytes + LOGITS * tokens * 256 * 4
    if held <= most:
        return None
    sentence = (
        "graphs of earlier microbatches are still held: backward each before the next forward, without retain_graph."
    )
    got = f"{held / 1e3:.0f} kB more at the peak than at the call"
    return "all_graphs_held", sentence, got, f"at most {most / 1e3:.0f} kB: one microbatch's graph and gradients"


def _forwards(record: RankRecord) -> list[Op]:
    return [op for op in record.ops if op.name == _EMBEDS]
