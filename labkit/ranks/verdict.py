"""What ledgers say against each other: pure functions of snapshots, one ledger per global rank, in rank order.

`definite` may be asked at any time: it compares only what both sides have issued. `at_end` adds what only the end
can show. `stuck` finds ranks that will wait for ever; believe it when it says the same twice with nothing written in
between. When two versions of a call have equally many ranks, that of the lowest rank counts as meant, and the
lowest of the others is named: judge again once the others had time to call too. Left out: causes that no ledger
shows (`watch`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.ranks import messages, swaps, waits, words
from labkit.ranks.layout import P2P, signature
from labkit.ranks.ledger import Channel, Entry, Ledger
from labkit.ranks.outcome import Whereabouts
from labkit.ranks.places import readable

Group = tuple[str, tuple[int, ...]]
Calls = dict[int, dict[int, Entry]]  # rank -> sequence -> entry


@dataclass(frozen=True)
class Finding:
    """`code` mismatch, unmatched, returned_early or deadlock; `rank` at fault (None: a cycle); its raw `place`."""

    code: str
    sentence: str
    rank: int | None
    place: str


def definite(ledgers: Sequence[Ledger]) -> Finding | None:
    """The first call on which ranks of a group already differ, or a send and its recv; None when all agree."""
    groups = _collectives(ledgers)
    for calls in groups.values():
        finding = _first_difference(calls, len(ledgers))
        if finding:
            return finding
    return _message_mismatch(ledgers) or next(filter(None, (_swap(c, len(ledgers)) for c in groups.values())), None)


def at_end(ledgers: Sequence[Ledger]) -> Finding | None:
    """For ranks that have all returned: `definite`, messages without their other half, collectives that some
    members skipped. A Work that nobody waited for is no failure."""
    return definite(ledgers) or _unmatched(ledgers) or _skipped(ledgers, range(len(ledgers)))


def stuck(ledgers: Sequence[Ledger], states: Sequence[str]) -> Finding | None:
    """Ranks that wait for what never comes. `states` per rank: running, returned, raised or died.

    A rank in collective k of a group waits for the members that have not issued k; one in a send or recv for a peer
    that has not issued the other half. returned_early: for a rank that returned. deadlock: only for one another.
    A rank that raised (a broken connection) counts as waiting where it failed; one that computes waits for nobody.
    """
    returned = tuple(rank for rank, state in enumerate(states) if state == "returned")
    needs = waits.needs(ledgers, states)
    other = messages.other_tag(ledgers, needs)
    if other:
        return Finding("mismatch", *other)
    early = _skipped(ledgers, returned) or _left_alone(ledgers, needs, returned)
    if early:
        return early
    cycle = [(rank, needs[rank]) for rank in waits.cycle(needs)]
    if not cycle:
        return None
    return Finding("deadlock", messages.circle(cycle, len(ledgers)), None, cycle[0][1].entry.place)


def unwaited(ledgers: Sequence[Ledger], states: Sequence[str]) -> Finding | None:
    """For ranks that stand still though nothing is missing: a message whose handle nobody waited for ("not_waited").

    Gloo drops a message together with its handle. Only believable after a long silence: it may be on its way.
    """
    found = messages.unwaited(ledgers, states)
    return Finding("not_waited", *found) if found else None


def whereabouts(ledgers: Sequence[Ledger], states: Sequence[str]) -> tuple[Whereabouts, ...]:
    """Per rank what its ledger knows: in which call it waits or failed, or that it sleeps."""
    result = []
    for rank, (ledger, state) in enumerate(zip(ledgers, states, strict=True)):
        entry = waits.current(ledger, state)
        if entry is not None:
            seen = "waiting" if state == "running" else state
            result.append(Whereabouts(rank, seen, words.call(entry, len(ledgers)), readable(entry.place)))
        else:
            asleep = state == "running" and ledger.asleep_until > 0
            result.append(Whereabouts(rank, state, "time.sleep" if asleep else "", ""))
    return tuple(result)


def _collectives(ledgers: Sequence[Ledger]) -> dict[Group, Calls]:
    groups: dict[Group, Calls] = defaultdict(lambda: defaultdict(dict))
    for rank, ledger in enumerate(ledgers):
        for entry in ledger.entries:
            if entry.op not in P2P and entry.state != "refused" and entry.ranks:
                groups[entry.group, entry.ranks][rank][entry.sequence] = entry
    return groups


def _signature(entry: Entry) -> tuple:
    return signature(entry.op, entry.shape, entry.dtype, entry.root, entry.reduce_op, entry.uneven)


def _same(a: Entry, b: Entry) -> bool:
    return _signature(a) == _signature(b)


def _first_difference(calls: Calls, world_size: int) -> Finding | None:
    """Compares digests at the last common call; only if they differ, calls one by one."""
    if not _digests_differ(calls):
        return None
    by_sequence: dict[int, dict[int, Entry]] = defaultdict(dict)
    for rank, entries in calls.items():
        for sequence, entry in entries.items():
            by_sequence[sequence][rank] = entry
    for sequence in sorted(by_sequence):
        versions = {_signature(entry) for entry in by_sequence[sequence].values()}
        if len(versions) > 1:
            return _difference(by_sequence[sequence], calls, world_size)
    return _overwritten(calls, by_sequence)


def _digests_differ(calls: Calls) -> bool:
    ranks = sorted(calls)
    for other in ranks[1:]:
        common = calls[ranks[0]].keys() & calls[other].keys()
        if common and calls[ranks[0]][max(common)].digest != calls[other][max(common)].digest:
            return True
    return False


def _overwritten(calls: Calls, by_sequence: Mapping[int, Mapping[int, Entry]]) -> Finding:
    ranks = sorted(calls)
    first = min(k for k, entries in by_sequence.items() if len(entries) > 1)
    digests = Counter(entry.digest for entry in by_sequence[first].values())
    meant = digests.most_common(1)[0][0]
    odd = [rank for rank, entry in by_sequence[first].items() if entry.digest != meant] or ranks[1:]
    return Finding(
        "mismatch",
        f"the collectives of {words.ranks(odd)} differ from those of the other ranks somewhere before #{first}, "
        "too long ago for the ledger to say where",
        odd[0],
        by_sequence[first][odd[0]].place,
    )


def _difference(entries: Mapping[int, Entry], calls: Calls, world_size: int) -> Finding:
    versions: dict[tuple, list[int]] = defaultdict(list)
    for rank in sorted(entries):
        versions[_signature(entries[rank])].append(rank)
    meant = max(versions.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    odd = min((ranks for ranks in versions.values() if ranks is not meant), key=lambda ranks: (len(ranks), ranks[0]))
    a, b = entries[odd[0]], entries[meant[0]]
    after_a, after_b = (calls[rank].get(a.sequence + 1) for rank in (odd[0], meant[0]))
    if after_a and after_b and _same(a, after_b) and _same(b, after_a):
        sentence = _swapped((a, after_a), (b, after_b), odd, meant)
        return Finding("mismatch", sentence, odd[0], a.place)
    one, many, what, rule = _aspect(a, b)
    name = words.call(a, world_size) if a.op == b.op else f"collective #{a.sequence}"
    sides = (
        f"{words.ranks(ranks)} {words.verb(ranks, one, many)} {what(entries[ranks[0]])}"
        f"{words.at(entries[rank] for rank in ranks)}"
        for ranks in (odd, meant)
    )
    return Finding("mismatch", f"{name} differs: {', '.join(sides)}; every rank must {rule}", odd[0], a.place)


def _aspect(a: Entry, b: Entry) -> tuple:
    """The first aspect in which two calls differ: verb for one and many, the value, the rule."""
    if a.op != b.op:
        return "calls", "call", lambda e: e.op, "call the same collectives in the same order"
    if a.shape != b.shape and not (a.uneven or b.uneven):
        return "passes", "pass", lambda e: f"shape {e.shape}", "pass the same shape"
    if a.dtype != b.dtype:
        return "passes", "pass", lambda e: f"dtype {e.dtype}", "pass the same dtype"
    if a.root != b.root:
        return "names", "name", lambda e: f"root {e.root}", "name the same root"
    if a.reduce_op != b.reduce_op:
        return "reduces", "reduce", lambda e: f"with {e.reduce_op}", "use the same reduce operation"
    return "passes", "pass", lambda e: f"{'un' * e.uneven}even shapes", "pass the same shapes"


def _swap(calls: Calls, world_size: int) -> Finding | None:
    group = next(iter(next(iter(calls.values())).values())).ranks
    found = swaps.find(calls, _same) if set(calls) == set(group) else None
    if found is None:
        return None
    i, j, odd = found
    meant = [rank for rank in sorted(calls) if rank not in odd]
    a, b = ((calls[ranks[0]][i], calls[ranks[0]][j]) for ranks in (odd, meant))
    return Finding("mismatch", _swapped(a, b, odd, meant), odd[0], a[0].place)


def _swapped(a: tuple[Entry, Entry], b: tuple[Entry, Entry], odd: Sequence[int], meant: Sequence[int]) -> str:
    first, second = _told_apart(a, b)
    return (
        f"swapped order: {a[0].op} #{a[0].sequence} and #{a[1].sequence} are {first}, then {second} on "
        f"{words.ranks(odd)}{words.at(a)}, but {second}, then {first} on {words.ranks(meant)}{words.at(b)}; "
        "every rank must call them in the same order"
    )


def _told_apart(a: tuple[Entry, Entry], b: tuple[Entry, Entry]) -> tuple[str, str]:
    """What the odd rank calls first and second: their names, the operation, the tensor, or only the lines."""
    x, y = (set(entry.tensor.split(",")) - {""} for entry in a)
    p, q = (set(entry.tensor.split(",")) - {""} for entry in b)
    u, v = sorted((x - y) & (q - p)), sorted((y - x) & (p - q))
    if u and v:
        return u[0], v[0]
    if a[0].op != a[1].op:
        return a[0].op, a[1].op
    if words.tensor(a[0]) != words.tensor(a[1]):
        return words.tensor(a[0]), words.tensor(a[1])
    if a[0].root != a[1].root:
        return f"root {a[0].root}", f"root {a[1].root}"
    if a[0].reduce_op != a[1].reduce_op:
        return a[0].reduce_op, a[1].reduce_op
    return readable(a[0].place) or "one", readable(a[1].place) or "the other"


def _message_mismatch(ledgers: Sequence[Ledger]) -> Finding | None:
    recvs: dict[tuple, Entry] = {}
    unsure = set()  # several recvs from any source at once may end in another order than they were matched
    for rank, ledger in enumerate(ledgers):
        for entry in ledger.entries:
            if entry.op == "recv" and entry.state != "refused":
                recvs[entry.group, entry.root, rank, entry.tag, entry.sequence] = entry
                if entry.any_source and not entry.blocking:
                    unsure.add((entry.group, rank, entry.tag))
    for source, ledger in enumerate(ledgers):
        for send in ledger.entries:
            if send.op != "send" or send.state == "refused" or (send.group, send.root, send.tag) in unsure:
                continue
            recv = recvs.get((send.group, source, send.root, send.tag, send.sequence))
            if recv and (recv.num_bytes, recv.dtype) != (send.num_bytes, send.dtype):
                sentence = (
                    f"{words.call(send, len(ledgers))} does not fit its recv: rank {source} sends "
                    f"{words.tensor(send)}{words.at([send])}, rank {send.root} receives {words.tensor(recv)}"
                    f"{words.at([recv])}; both must be of the same size and dtype"
                )
                return Finding("mismatch", sentence, send.root, recv.place)
    return None


def _unmatched(ledgers: Sequence[Ledger]) -> Finding | None:
    if any(ledger.overflow for ledger in ledgers):
        return None
    sends, recvs, spare = Counter(), Counter(), Counter()
    for rank, ledger in enumerate(ledgers):
        for c in ledger.channels:
            if c.op == "send":
                sends[c.group, rank, c.peer, c.tag] += c.count
            elif c.peer is None:
                spare[c.group, rank, c.tag] += c.count
            else:
                recvs[c.group, c.peer, rank, c.tag] += c.count
    for key in sorted(sends.keys() | recvs.keys()):
        group, source, target, tag = key
        extra = sends[key] - recvs[key]
        taken = min(max(extra, 0), spare[group, target, tag])
        spare[group, target, tag] -= taken
        if extra - taken:
            rank, op = (source, "send") if extra > 0 else (target, "recv")
            peer = target if extra > 0 else source
            return _half(ledgers, rank, op, peer, Channel(group, (), op, peer, tag, min(sends[key], recvs[key]), 0))
    for (group, rank, tag), count in sorted(spare.items()):
        if count:
            return _half(ledgers, rank, "recv", None, Channel(group, (), "recv", None, tag, 0, 0))
    return None


def _half(ledgers: Sequence[Ledger], rank: int, op: str, peer: int | None, channel: Channel) -> Finding:
    """Names the message that has no other half, by its entry if the ring still has it."""
    wanted = (op, peer, channel.tag, channel.group)
    entries = [e for e in ledgers[rank].entries if (e.op, e.root, e.tag, e.group) == wanted]
    entry = next((e for e in entries if e.sequence >= channel.count), entries[-1] if entries else None)
    name = words.call(entry, len(ledgers)) if entry else f"a {op}"
    other = {"send": f"rank {peer} never received it", "recv": "nobody sent it"}[op]
    if op == "recv" and peer is not None:
        other = f"rank {peer} never sent it"
    place = entry.place if entry else ""
    sentence = f"rank {rank} issued {name}{words.in_brackets([place])}; {other}; every send needs its recv"
    return Finding("unmatched", sentence, rank, place)


def _skipped(ledgers: Sequence[Ledger], returned: Sequence[int]) -> Finding | None:
    """A member of a group that returned having issued fewer collectives than another member."""
    counts: dict[Group, Counter] = defaultdict(Counter)
    for rank, ledger in enumerate(ledgers):
        for tally in ledger.groups:
            counts[tally.group, tally.ranks][rank] = tally.count
    for (group, members), count in counts.items():
        most = max((count[rank] for rank in members), default=0)
        early = [rank for rank in members if rank in returned and count[rank] < most]
        if early:
            missing = min(count[rank] for rank in early)
            gone = [rank for rank in early if count[rank] == missing]
            return _early(ledgers, gone, (group, members), missing)
    return None


def _early(ledgers: Sequence[Ledger], gone: Sequence[int], group: Group, missing: int) -> Finding:
    there = {
        rank: entry
        for rank, ledger in enumerate(ledgers)
        for entry in ledger.entries
        if (entry.group, entry.ranks, entry.sequence) == (*group, missing) and entry.op not in P2P
        and entry.state != "refused"
    }  # fmt: skip
    last = [e for e in ledgers[gone[0]].entries if (e.group, e.ranks) == group]
    place = last[-1].place if last else ""
    start = f"{words.ranks(gone)} returned"
    if not there:
        sentence = f"{start} without collective #{missing}; every rank must call it"
        return Finding("returned_early", sentence, gone[0], place)
    ranks = sorted(there)
    waiting = all(there[rank].state in ("waiting", "failed") for rank in ranks)
    doing = words.verb(ranks, "waits in", "wait in") if waiting else words.verb(ranks, "has issued", "have issued")
    name = words.call(there[ranks[0]], len(ledgers))
    sentence = f"{start}; {words.ranks(ranks)} {doing} {name}{words.at(there.values())}; every rank must call it"
    if len(group[1]) < len(ledgers):
        sentence = sentence.replace("every rank must", "every rank of that group must")
    return Finding("returned_early", sentence, gone[0], there[ranks[0]].place)


def _left_alone(ledgers: Sequence[Ledger], needs, returned: Sequence[int]) -> Finding | None:
    for rank, need in needs.items():
        gone = [other for other in need.ranks if other in returned]
        if gone and (not need.any_of_them or len(gone) == len(need.ranks)):
            half = "posted the recv" if need.entry.op == "send" else "sent it"
            sentence = (
                f"{words.ranks(gone)} returned; rank {rank} waits in {words.call(need.entry, len(ledgers))}"
                f"{words.at([need.entry])}; {words.ranks(gone)} never {half}"
            )
            return Finding("returned_early", sentence, gone[0], need.entry.place)
    return None
