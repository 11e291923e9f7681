"""Messages whose tensor is touched before wait(): sent and written meanwhile, received and used too soon.

Exercises 7.2 to 7.4 ask this. What comes of it is a matter of luck, and numbers alone do not tell it. Left out: a
message that is a part of a larger storage, of which another part may be written.
"""

from __future__ import annotations

from labkit.check import evidence
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong
from labkit.labs.lab00 import attempts
from labkit.ranks.places import readable
from labkit.record.events import RankRecord


def changed_under_way(observed: Observed, tried: str) -> Verdict | None:
    """Cause "changed_under_way": a send whose tensor is written before it is waited for."""
    for rank, record in enumerate(observed.records):
        if record is not None and _written(record):  # `honest` tells of a missing record
            sentence = f"rank {rank} changes a tensor while it is being sent: wait for the send before that."
            got = "a sent tensor is written before wait()"
            return wrong("evidence", "changed_under_way", sentence, tried, got, "wait() first")
    return None


def _written(record: RankRecord) -> bool:
    ends = {wait.of: wait.index for wait in record.waits if wait.how == "call"}
    sizes = dict(record.begin)
    for delta in record.deltas:
        sizes[delta.storage] = max(sizes.get(delta.storage, 0), delta.num_bytes)
    for sent in record.communications:
        if sent.op == "send" and not sent.blocking:
            whole = {storage for storage in sent.reads if sizes.get(storage) == sent.sent_bytes}
            after = record.events[sent.index + 1 : ends.get(sent.index)]
            if any(whole.intersection(getattr(event, "writes", ())) for event in after):
                return True
    return False


def used_too_soon(observed: Observed, tried: str) -> Verdict | None:
    """Cause "not_waited": a receive that nobody waited for, for an answer whose values are wrong."""
    rank = attempts.left_open(observed)
    if rank is None:
        return None
    sentence = f"rank {rank} uses a tensor before it has come: call wait() of its irecv first."
    return wrong("evidence", "not_waited", sentence, tried, "an irecv without wait()", "wait(), then use it")


def left_behind(observed: Observed) -> str:
    """For ranks that stand still though every message has both ends: a handle that may have been dropped; "" for none.

    A receive is told first. Of a send "not_waited" has told already, and only that of a rank that has returned counts:
    others may still come to wait for theirs.
    """
    cause = observed.outcome.cause
    returned = {where.rank for where in cause.whereabouts if where.state == "returned"}
    open_ = [(rank, entry) for rank, ledger in enumerate(observed.outcome.ledgers) for entry in ledger
             if entry.op in evidence.P2P and entry.state == "issued" and not entry.blocking]  # fmt: skip
    found = [each for each in open_ if each[1].op == "recv"]
    if not found and cause.code != "not_waited":
        found = [each for each in open_ if each[0] in returned]
    if not found:
        return ""
    rank, entry = found[0]
    return (
        f"rank {rank} has not waited for its i{entry.op} ({readable(entry.place)}): a handle that is dropped takes its "
        "message with it, and others stand still. Keep it, and call wait() before its tensor is used."
    )
