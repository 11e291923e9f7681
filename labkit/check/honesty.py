"""Did the work go the way it seems to have gone? What a rank says of itself against what the parent saw of
it.

The parent's own evidence: the ledger in shared memory, each group's own counter, and the bytes on the
rank's TCP sockets, which the kernel counts. The rank's: its record, and what `labkit.record.integrity`
found odd. The odd findings are told first, for they say what happened; the parent's comparisons catch what
hid from them. Left out: bytes of collectives on the wire, which depend on gloo's algorithm, and sockets
under NCCL.
"""

from __future__ import annotations

from typing import Any

from labkit.check.exercise import Verdict, wrong
from labkit.check.observed import Observed

P2P = ("send", "recv")
# A message of gloo costs 96 bytes beside its payload on the sender's socket and 48 on the receiver's
# (measured,
# torch 2.13); the constant is per message and leaves room for other versions.
HEADER_BYTES = 256
SOCKET_TOLERANCE = 0.001


def honest(observed: Observed, tried: str = "") -> Verdict | None:
    """Stage "evidence": nothing odd was found in any rank, and record, ledger, counters and sockets agree.

    A finding counts also if only the report pipe knows of it, for there it cannot be taken back.
    Causes: the codes of `labkit.record.integrity` ("patched", "thread_started", "store_used", ...);
    "no_record"; "record_differs"; "hidden_collective"; "hidden_traffic" and "no_traffic" (sockets carried
    more, or less, than the ledger tells).
    """
    return (
        _odd(observed, tried)
        or records_agree(observed, tried)
        or counters_agree(observed, tried)
        or sockets_agree(observed, tried)
    )


def _odd(observed: Observed, tried: str) -> Verdict | None:
    from labkit.ranks.places import readable
    from labkit.record.integrity import Integrity

    for rank, integrity in enumerate(observed.integrity):
        if not isinstance(integrity, Integrity):
            sentence = f"rank {rank} came back without the record that every rank hands in."
            return wrong("evidence", "no_record", sentence, tried)
        told = observed.witnesses[rank]
        for code, sentence, place in [each for each in told if type(each) is list and len(each) == 3]:
            if not integrity.has(code):
                got = f"rank {rank}: {code}{f' ({readable(place)})' if place else ''}, and no word of it at the end"
                return wrong("evidence", code, sentence, tried, got, "torch.distributed alone")
        for finding in integrity.findings:
            place = f" ({readable(finding.place)})" if finding.place else ""
            got = f"rank {rank}: {finding.code}{place}"
            return wrong("evidence", finding.code, finding.sentence, tried, got, "torch.distributed alone")
        if told != (*([f.code, f.sentence, f.place] for f in integrity.findings), len(integrity.findings)):
            sentence = f"what rank {rank} told while it ran is not what it handed in at its end."
            return wrong("evidence", "no_record", sentence, tried)
    return None


def records_agree(observed: Observed, tried: str = "") -> Verdict | None:
    """Cause "record_differs": the ledger has communication that the rank's record lacks, or the reverse."""
    for rank, (record, ledger) in enumerate(zip(observed.records, observed.outcome.ledgers, strict=True)):
        recorded = len(record.communications) if record is not None else 0
        noted = len(_calls(ledger))
        if recorded != noted:
            sentence = "some communication went past the record of the rank."
            got = f"rank {rank}: {recorded} operations recorded"
            return wrong("evidence", "record_differs", sentence, tried, got, f"{noted}, as the ledger has")
    return None


def counters_agree(observed: Observed, tried: str = "") -> Verdict | None:
    """Cause "hidden_collective": a group counted more operations than its ledger holds."""
    for rank, hidden in enumerate(hidden_operations(observed)):
        if hidden:
            sentence = f"the group of rank {rank} counted {hidden} more operations than were seen."
            return wrong("evidence", "hidden_collective", sentence, tried, f"{hidden} unseen", "none unseen")
    return None


def sockets_agree(observed: Observed, tried: str = "") -> Verdict | None:
    """Causes "hidden_traffic", "no_traffic": bytes on each rank's sockets against the ledger's messages.

    They agree within 0.1% plus HEADER_BYTES for each message. Not decided (None) where the system does not
    tell, under another backend than gloo, and when collectives were used, whose way on the wire is gloo's
    own.
    """
    moved, ledgers = observed.outcome.socket_bytes, observed.outcome.ledgers
    if moved is None or observed.outcome.backend != "gloo" or any(e.op not in P2P for e in sum(ledgers, ())):
        return None
    for rank, (seen, ledger) in enumerate(zip(moved, ledgers, strict=True)):
        calls = _calls(ledger)
        room = HEADER_BYTES * len(calls)
        for kind, verb, measured in (("send", "sent", seen.sent), ("recv", "received", seen.received)):
            told = sum(e.num_bytes for e in calls if e.op == kind)
            if abs(measured - told) > SOCKET_TOLERANCE * told + room:
                cause = "hidden_traffic" if measured > told else "no_traffic"
                sentence = f"rank {rank} {verb} {'more' if measured > told else 'less'} than its calls tell."
                got, expected = f"{measured} bytes on its sockets", f"{told} bytes in its calls"
                return wrong("evidence", cause, sentence, tried, got, expected)
    return None


def hidden_operations(observed: Observed) -> list[int]:
    """Per rank, operations that its groups' own counters know of and the ledger does not;

    zeros but for gloo.
    """
    if observed.outcome.backend != "gloo":
        return [0] * observed.world_size
    hidden = []
    for ledger, numbers in zip(observed.outcome.ledgers, observed.outcome.sequence_numbers, strict=True):
        known: dict[str, int] = {}
        for entry in _calls(ledger):
            # gloo's counter goes up once per rank in a reduce_scatter of a list.
            ticks = max(2, len(entry.ranks)) if entry.op == "reduce_scatter" else 1
            known[entry.group] = known.get(entry.group, 0) + ticks
        hidden.append(sum(max(0, count - known.get(group, 0)) for group, count in numbers.items()))
    return hidden


def _calls(ledger: Any) -> list[Any]:
    return [entry for entry in ledger if entry.state != "refused"]
