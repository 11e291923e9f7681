"""What is wrong with sends and recvs that never meet: pure functions of ledgers, as sentences for `verdict`.

Left out: messages of unequal size, and those that nobody ever issued the other half of (`verdict`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.ranks import waits, words
from labkit.ranks.layout import P2P
from labkit.ranks.ledger import Entry, Ledger

Found = tuple[str, int, str]  # sentence, rank at fault, raw place


def circle(cycle: Sequence[tuple[int, waits.Need]], world_size: int) -> str:
    """The sentence for ranks that wait for one another, each for the next."""
    entries = [need.entry for _, need in cycle]
    ranks = [rank for rank, _ in cycle]
    kinds = {entry.op for entry in entries}
    both = f"ranks {words.listed(sorted(ranks))} {'both' if len(ranks) == 2 else 'all'}"
    if len(ranks) == 1:
        does = {"send": "sends to itself", "recv": "receives from itself"}.get(entries[0].op, "waits for itself")
        return f"rank {ranks[0]} {does}{words.at(entries)}: a rank cannot be its own neighbour; copy instead"
    if kinds == {"send"}:
        return (
            f"{both} send first{words.at(entries)}: a send returns only once its peer has posted the recv; "
            "let one of them receive first"
        )
    if kinds == {"recv"}:
        return f"{both} receive first{words.at(entries)}: nobody has sent; let one of them send first"
    steps = (
        f"rank {rank} waits in {words.call(need.entry, world_size)}{words.at([need.entry])} "
        f"for rank {ranks[(i + 1) % len(ranks)]}"
        for i, (rank, need) in enumerate(cycle)
    )
    return f"deadlock: {'; '.join(steps)}"


def other_tag(ledgers: Sequence[Ledger], needs: Mapping[int, waits.Need]) -> Found | None:
    """A rank waits for its peer's half, and the peer has issued it under another tag."""
    for rank, need in sorted(needs.items()):
        entry = need.entry
        if entry.op not in P2P or entry.root is None:
            continue
        half = "recv" if entry.op == "send" else "send"
        for theirs in ledgers[entry.root].entries:
            fits = (theirs.op, theirs.root, theirs.group, theirs.ranks) == (half, rank, entry.group, entry.ranks)
            if fits and theirs.tag != entry.tag and theirs.state != "done":
                sentence = (
                    f"rank {rank} waits in {entry.op} #{entry.sequence} with tag {entry.tag}{words.at([entry])}, "
                    f"but rank {entry.root} has issued its {half} with tag {theirs.tag}{words.at([theirs])}; "
                    "a send and its recv must have the same tag"
                )
                return sentence, entry.root, theirs.place
    return None


def unwaited(ledgers: Sequence[Ledger], states: Sequence[str]) -> Found | None:
    """A rank waits in a send or recv whose other half was issued without waiting for it."""
    for rank, (ledger, state) in enumerate(zip(ledgers, states, strict=True)):
        entry = waits.current(ledger, state)
        if entry is None or entry.op not in P2P or entry.root is None:
            continue
        half = _half_of(ledgers[entry.root], entry, rank)
        if half is not None and half.state == "issued":
            did = "returned" if states[entry.root] == "returned" else "went on"
            sentence = (
                f"rank {entry.root} {did} without waiting for its i{half.op} #{half.sequence}{words.at([half])}, so "
                f"rank {rank} waits for ever in {words.call(entry, len(ledgers))}{words.at([entry])}; "
                "keep the handle and call wait() on it"
            )
            return sentence, entry.root, half.place
    return None


def _half_of(ledger: Ledger, entry: Entry, rank: int) -> Entry | None:
    wanted = ("recv" if entry.op == "send" else "send", rank, entry.tag, entry.group, entry.sequence)
    return next((e for e in ledger.entries if (e.op, e.root, e.tag, e.group, e.sequence) == wanted), None)
