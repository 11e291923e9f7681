"""What one rank told its process groups, in memory that the notebook can read while the rank hangs or is dead.

One sparse memfd (an unlinked temporary file where there is no memfd) per rank: a header, one row per process
group, one row per point-to-point channel, and a ring of fixed-size records. A record carries its own checksum,
so a reader never mistakes a half-written one for a call; rows and header are read between equal counters.
No tensors, no locks shared between processes, no growth: a long run overwrites its oldest records, and a rolling
digest per group still tells whether what was overwritten agreed.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.ranks import layout, wire
from labkit.ranks.book import Book


@dataclass(frozen=True)
class Entry:
    """One collective or message as one rank called it.

    `sequence` counts from 0 within the group; for send and recv within (group, peer, direction, tag), so that
    the k-th send on a channel belongs to the k-th recv. `root` is a global rank: the root of a collective, the
    peer of a message, None for a recv from any source that has not finished. `shape` is that of the local tensor
    (several tensors: their elements in one dim). States: issued, waiting (a thread is inside the blocking wait),
    done, failed (the wait raised), refused (the call itself raised and never reached the group).
    `tensor` holds the names the caller had for the tensor, comma separated; `path` is a checksum of the places of
    all the reader's frames, from which the call came.
    """

    index: int
    op: str
    group: str
    ranks: tuple[int, ...]
    sequence: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    root: int | None
    reduce_op: str
    tag: int
    state: str
    blocking: bool
    place: str
    tensor: str = ""
    path: int = 0
    uneven: bool = False
    any_source: bool = False
    digest: int = 0


@dataclass(frozen=True)
class Tally:
    """How many collectives a rank issued in a group, and the digest of all of them."""

    group: str
    ranks: tuple[int, ...]
    count: int
    digest: int


@dataclass(frozen=True)
class Channel:
    """How many messages a rank sent to, or posted recvs for, one peer (None: any source) under one tag."""

    group: str
    ranks: tuple[int, ...]
    op: str
    peer: int | None
    tag: int
    count: int
    digest: int


@dataclass(frozen=True)
class Ledger:
    """A snapshot: the newest entries, what is known of all of them, and the state of the rank.

    `asleep_until` is in seconds of time.monotonic, 0.0 when the rank is not in time.sleep. `overflow` says that
    there were more groups or channels than rows, so that the tallies are not complete.
    """

    entries: tuple[Entry, ...]
    first_index: int
    state: str
    asleep_until: float
    last_words: str
    last_words_place: str
    progress: int
    groups: tuple[Tally, ...] = ()
    channels: tuple[Channel, ...] = ()
    overflow: bool = False


def create() -> int:
    """A new empty ledger; returns its file descriptor (close-on-exec), layout.NUM_BYTES long and sparse."""
    fd = wire.anonymous_file("labkit-ledger")
    os.ftruncate(fd, layout.NUM_BYTES)
    return fd


def open_in_rank(fd: int) -> Book:
    """The writer's end, for the one process that is the rank."""
    return Book(mmap.mmap(fd, layout.NUM_BYTES))


def peek(fd: int) -> int:
    """How many writes the rank has finished so far: equal twice means that it issued, waited and slept no further."""
    return struct.unpack("<Q", os.pread(fd, 8, 8))[0]


def read(fd: int, last: int = layout.CAPACITY) -> Ledger:
    """A snapshot of the newest `last` entries (those of a record being written at this moment are left out)."""
    head, tables = _steady(fd)
    _, _, records, _, _, groups, channels, *_ = head
    rows = tuple(_read_group(tables, i) for i in range(groups))
    first = max(0, records - min(last, layout.CAPACITY))
    entries = tuple(e for e in (_read_entry(fd, at, rows) for at in _blocks(fd, first, records)) if e)
    return _with_header(head, entries, rows, tuple(_read_channel(tables, i, rows) for i in range(channels)))


def read_header(fd: int) -> Ledger:
    """Only the state of the rank: a Ledger without entries, groups and channels."""
    return _with_header(_steady(fd, layout.GROUPS_AT)[0])


def _with_header(head: tuple, entries=(), groups=(), channels=()) -> Ledger:
    _, ended, _, asleep_until, state, _, _, overflow, words, place = head
    first = entries[0].index if entries else 0
    return Ledger(entries, first, layout.STATES[state], asleep_until, _text(words), _text(place), ended, groups,
                  channels, bool(overflow))  # fmt: skip


def _steady(fd: int, size: int = layout.RECORDS_AT) -> tuple[tuple, bytes]:
    """The header and rows, read again (20 times at most) while the rank changes them."""
    for _ in range(20):
        raw = os.pread(fd, size, 0)
        head = layout.HEADER.unpack_from(raw)
        if head[0] == head[1] == peek(fd):
            break
    return head, raw


def _blocks(fd: int, first: int, records: int) -> Iterator[tuple[int, bytes]]:
    """Yields (index, bytes) of the ring's records in order, read in as few calls as the ring allows."""
    while first < records:
        slot = first % layout.CAPACITY
        count = min(records - first, layout.CAPACITY - slot)
        raw = os.pread(fd, count * layout.ROW["record"], layout.RECORDS_AT + slot * layout.ROW["record"])
        for i in range(count):
            yield first + i, raw[i * layout.ROW["record"] : (i + 1) * layout.ROW["record"]]
        first += count


def _read_entry(fd: int, numbered: tuple[int, bytes], groups: tuple[Tally, ...]) -> Entry | None:
    index, raw = numbered
    for _ in range(3):
        checksum, state, blocking = layout.MARKS.unpack_from(raw)
        body = raw[layout.MARKS.size : layout.MARKS.size + layout.BODY.size]
        if checksum == zlib.crc32(body):
            break
        raw = os.pread(fd, layout.ROW["record"], layout.RECORDS_AT + index % layout.CAPACITY * layout.ROW["record"])
    else:
        return None
    written, sequence, num_bytes, digest, path, root, tag, row, flags, dims, *rest = layout.BODY.unpack(body)
    if written != index or row >= len(groups):
        return None
    op, dtype, reduce_op, tensor, place = (_text(x) for x in rest[8:])
    return Entry(
        index, op, groups[row].group, groups[row].ranks, sequence, tuple(rest[:dims]), dtype, num_bytes,
        None if root < 0 else root, reduce_op, tag, layout.ENTRY_STATES[state], bool(blocking), place, tensor, path,
        bool(flags & 1), bool(flags & 2), digest,
    )  # fmt: skip


def _read_group(tables: bytes, row: int) -> Tally:
    count, digest, size, name, *ranks = layout.GROUP.unpack_from(tables, layout.GROUPS_AT + row * layout.ROW["group"])
    return Tally(_text(name), tuple(ranks[:size]), count, digest)


def _read_channel(tables: bytes, row: int, groups: tuple[Tally, ...]) -> Channel:
    at = layout.CHANNELS_AT + row * layout.ROW["channel"]
    count, digest, peer, tag, group, direction = layout.CHANNEL.unpack_from(tables, at)
    of = groups[group]
    return Channel(of.group, of.ranks, layout.P2P[direction], None if peer < 0 else peer, tag, count, digest)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
