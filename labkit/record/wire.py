"""What gloo really puts on the wire: its own algorithms, message by message, to be held against sockets.

A message costs 48 bytes of header, one notice of 48 bytes from its sender and one from its receiver; found so
with torch 2.11-2.13's gloo for every collective below, at 2, 3 and 4 ranks, to the byte. Where it differs from
`collectives`: broadcast goes down a binomial tree, reduce is a ring reduce-scatter and a gather, and a
reduce_scatter is a whole all_reduce of the input. The all_reduce ring is gloo's own (segments of at most 1 MiB,
at least two per rank; github.com/facebookincubator/gloo gloo/allreduce.cc). Left out: NCCL, gloo over shared
memory, and a sparse all_reduce, of which a rank's record does not tell how much the other ranks have: it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.record.events import Collective, PointToPoint, RankRecord

HEADER_BYTES = 48
MAX_SEGMENT_BYTES = 1 << 20
SEGMENTS_PER_RANK = 2


@dataclass(frozen=True)
class WireBytes:
    """Bytes a rank puts on its sockets and takes from them. `messages` are those it sends."""

    sent: int
    received: int
    messages: int

    def __add__(self, other: WireBytes) -> WireBytes:
        pairs = (self.sent + other.sent, self.received + other.received, self.messages + other.messages)
        return WireBytes(*pairs)


def _bytes(out: list[int], into: list[int]) -> WireBytes:
    """Of messages with these payloads: a receiver's notice goes the other way."""
    head = HEADER_BYTES
    sent = sum(out) + 2 * head * len(out) + head * len(into)
    received = sum(into) + 2 * head * len(into) + head * len(out)
    return WireBytes(sent, received, len(out))


def expected_wire_bytes(record: RankRecord) -> WireBytes:
    """What a rank's sockets must show for everything in its record, on gloo.

    Raises ValueError where a record does not tell: for a sparse all_reduce between ranks.
    """
    total = WireBytes(0, 0, 0)
    for event in record.communications:
        total += gloo_bytes(event, record.rank)
    return total


def gloo_bytes(event: Collective | PointToPoint, rank: int) -> WireBytes:
    """Wire bytes of one communication for the rank that recorded it. Raises ValueError for a sparse all_reduce."""
    if isinstance(event, PointToPoint):
        return _bytes([event.num_bytes], []) if event.op == "send" else _bytes([], [event.num_bytes])
    n, size = len(event.ranks), event.num_bytes
    if n < 2:
        return WireBytes(0, 0, 0)
    if event.is_sparse:
        raise ValueError(
            f"event {event.index} of rank {rank} is a sparse all_reduce: its bytes on the wire depend on how many "
            "elements the other ranks have, which this rank's record does not tell; sent_bytes takes them for as many"
        )
    me = event.ranks.index(rank)
    root = event.ranks.index(event.root) if event.root is not None else 0
    if event.op == "all_reduce":
        return _all_reduce(size, event.element_bytes, n, me)
    if event.op == "reduce_scatter":
        if event.call == "reduce_scatter":  # of a list: one reduction after the other
            each = _all_reduce(size // n, event.element_bytes, n, me)
            return WireBytes(n * each.sent, n * each.received, n * each.messages)
        return _all_reduce(size, event.element_bytes, n, me)
    if event.op == "all_gather":
        return _all_gather(size // n, n)
    if event.op == "broadcast":
        return _broadcast(size, n, (me - root) % n)
    if event.op == "reduce":
        return _reduce(size, event.element_bytes, n, me, root)
    if event.op == "barrier":
        rounds = (n - 1).bit_length()
        return _bytes([0] * rounds, [0] * rounds)
    return _direct(event, n, me == root)


def _direct(event: Collective, n: int, is_root: bool) -> WireBytes:
    """gather, scatter and all_to_all: one message per pair."""
    part = event.num_bytes // n
    if event.op == "gather":
        return _bytes([], [part] * (n - 1)) if is_root else _bytes([part], [])
    if event.op == "scatter":
        return _bytes([part] * (n - 1), []) if is_root else _bytes([], [part])
    sent, received = event.sent_bytes, event.received_bytes
    return _bytes([sent] + [0] * (n - 2), [received] + [0] * (n - 2))


def _segments(size: int, element_bytes: int, n: int) -> list[int]:
    """Bytes of gloo's segments of a tensor: the same number for each rank, the last ones may be empty."""
    largest = element_bytes * (MAX_SEGMENT_BYTES // element_bytes)
    count = _up(max(_ratio(size, largest), n * SEGMENTS_PER_RANK), n)
    each = _up(_ratio(size, count), element_bytes)
    return [max(0, min(each, size - i * each)) for i in range(count)]


def _ratio(size: int, by: int) -> int:
    """Rounded up."""
    return (size + by - 1) // by


def _up(size: int, multiple: int) -> int:
    """The next multiple."""
    return _ratio(size, multiple) * multiple


def _of_rank(segments: list[int], n: int, owner: int) -> list[int]:
    per_rank = len(segments) // n
    mine = segments[(owner % n) * per_rank : (owner % n + 1) * per_rank]
    return [segment for segment in mine if segment]  # an empty one is not sent


def _all_reduce(size: int, element_bytes: int, n: int, me: int) -> WireBytes:
    """The ring runs downwards: a rank sends to the one before it. In the reduce-scatter it sends all parts but
    its own, which ends with it; in the all-gather all but its neighbour's."""
    segments = _segments(size, element_bytes, n)

    def sent_by(rank: int) -> list[int]:
        owners = [rank + i for i in range(1, n)] + [rank + i for i in range(n - 1)]
        return [segment for owner in owners for segment in _of_rank(segments, n, owner)]

    return _bytes(sent_by(me), sent_by((me + 1) % n))


def _all_gather(part: int, n: int) -> WireBytes:
    """Each part in two messages, n-1 times round the ring."""
    half = _ratio(part, 2)
    pieces = [piece for piece in (half, part - half) if piece] * (n - 1)
    return _bytes(pieces, pieces)


def _broadcast(size: int, n: int, virtual: int) -> WireBytes:
    """Binomial tree: in round i the first 2^i ranks from the root send 2^i on."""
    children = [1 << i for i in range((n - 1).bit_length()) if virtual < 1 << i and virtual + (1 << i) < n]
    return _bytes([size] * len(children), [size] if virtual else [])


def _reduce(size: int, element_bytes: int, n: int, me: int, root: int) -> WireBytes:
    """Ring reduce-scatter, then every other rank sends its part to the root.

    gloo stops this ring two segments before its end, not one part before it: above 2n MiB, where a part has
    more than two segments, it sends some of them for nothing (gloo/reduce.cc).
    """
    each = min(_up(_ratio(size, n * SEGMENTS_PER_RANK), element_bytes), MAX_SEGMENT_BYTES) or 1
    count = max(_up(_ratio(size, each), n), n * SEGMENTS_PER_RANK)
    segments = [max(0, min(each, size - i * each)) for i in range(count)]
    per_rank = len(segments) // n

    def scattered(rank: int) -> list[int]:
        order = [((rank + 1 + i // per_rank) % n) * per_rank + i % per_rank for i in range(len(segments) - 2)]
        return [segments[i] for i in order if segments[i]]

    out, into = scattered(me), scattered((me + 1) % n)
    done = {rank: sum(_of_rank(segments, n, rank)) for rank in range(n)}
    if me == root:
        into += [done[rank] for rank in range(n) if rank != root and done[rank]]
    elif done[me]:
        out.append(done[me])
    return _bytes(out, into)
