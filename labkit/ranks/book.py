"""The writing end of a ledger: the one process that is the rank, any of its threads.

Every change is a handful of stores into shared memory (a few microseconds), between two counters.
Left out: what to write (`intercept`).
"""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from labkit.ranks import layout


@dataclass
class _Row:
    """The writer's own copy of a group's or channel's row; `key` is (name, ranks) or (group row, op, peer, tag)."""

    index: int
    key: tuple
    count: int = 0
    digest: int = 0


class Book:
    """The rank's end of its ledger. Any thread may write; a forked child of the rank writes nothing."""

    def __init__(self, memory: mmap.mmap):
        self._memory, self._lock, self._pid = memory, threading.RLock(), os.getpid()
        self._writes = self._records = 0
        self._asleep_until, self._state, self._overflow = 0.0, 0, 0
        self._words, self._words_place = b"", b""
        self._new_rows: tuple[_Row, ...] = ()  # rows that no reader knows of yet
        self._groups: dict[tuple, _Row] = {}
        self._channels: dict[tuple, _Row] = {}
        self._where: dict[int, tuple] = {}  # index -> (fields, row, count and digest before)

    @property
    def is_mine(self) -> bool:
        """False in a process that the rank forked."""
        return os.getpid() == self._pid

    def set_state(self, state: str) -> None:
        """starting, running, returned or raised."""
        self._update(_state=layout.STATES.index(state))

    def sleep_until(self, time_s: float) -> None:
        """Notes a sleep up to this value of time.monotonic; 0.0 when it is over."""
        self._update(_asleep_until=time_s)

    def say_last(self, words: str, place: str = "") -> None:
        """Notes what is about to end this process; "" takes it back."""
        self._update(_words=_fit(words, 48), _words_place=_fit(place, 200, keep_end=True))

    def note(self, op, group, ranks, *, shape=(), dtype="", num_bytes=0, root=None, reduce_op="", tag=0,
             place="", path=0, tensor="", uneven=False, any_source=False) -> int:  # fmt: skip
        """Writes one entry, issued, and returns its index; the arguments are Entry's."""
        shape = tuple(shape) if len(shape) <= 8 else (*shape[:7], -1)
        with self._lock:
            group_row = row = self._group(group, tuple(ranks))
            what = layout.signature(op, shape, dtype, root, reduce_op, uneven)
            if op in layout.P2P:
                row, what = self._channel(group_row.index, op, root, tag), (num_bytes, dtype)
            before, index = (row.count, row.digest), self._records
            row.count, row.digest = row.count + 1, _next_digest(row.digest, what)
            fields = [index, before[0], num_bytes, row.digest, root, tag, group_row.index,
                      uneven + 2 * any_source, shape, op, dtype, reduce_op, tensor, place, path]  # fmt: skip
            self._records = index + 1
            self._where[index] = (fields, row, before)
            self._where.pop(index - layout.CAPACITY, None)
            self._change(self._put_all, (row,), fields)
        return index

    def mark(self, index: int, state: str, blocking: bool = False) -> None:
        """Sets an entry's state; does nothing once the ring has gone past it. blocking, once set, stays set."""
        with self._lock:
            if index in self._where and self.is_mine:
                at = layout.RECORDS_AT + index % layout.CAPACITY * layout.ROW["record"] + 4
                marks = bytes((layout.ENTRY_STATES.index(state), self._memory[at + 1] | blocking))
                if marks != self._memory[at : at + 2]:
                    self._change(self._memory.__setitem__, slice(at, at + 2), marks)

    def refuse(self, index: int) -> None:
        """The call raised before it reached the group: takes its number back unless another call followed."""
        with self._lock:
            _, row, before = self._where.get(index, (None, None, None))
            if row and row.count == before[0] + 1:
                row.count, row.digest = before
                self._change(self._put_tally, row)
        self.mark(index, "refused")

    def resolve(self, index: int, source: int) -> None:
        """A recv from any source has finished: names its source and counts it there."""
        with self._lock:
            if index not in self._where or not self.is_mine:
                return
            fields, old, before = self._where[index]
            row = self._channel(fields[6], "recv", source, fields[5])
            fields[1], fields[4] = row.count, source
            old.count -= 1
            row.count, row.digest = row.count + 1, _next_digest(row.digest, (fields[2], fields[10]))
            self._where[index] = (fields, row, before)
            at = layout.RECORDS_AT + index % layout.CAPACITY * layout.ROW["record"] + 4
            marks = self._memory[at : at + 2]
            self._change(self._put_all, (old, row), fields, marks)

    def _update(self, **fields) -> None:
        with self._lock:
            vars(self).update(fields)
            self._change(self._put_header)

    def _change(self, write: Callable[..., object], *arguments) -> None:
        """Writes between two counters: a reader that sees them differ reads again."""
        if not self.is_mine:
            return
        ended, self._writes = self._writes, self._writes + 1
        layout.COUNTERS.pack_into(self._memory, 0, self._writes, ended, self._records)
        write(*arguments)
        layout.COUNTERS.pack_into(self._memory, 0, self._writes, self._writes, self._records)

    def _put_header(self) -> None:
        layout.HEADER.pack_into(
            self._memory, 0, self._writes, self._writes - 1, self._records, self._asleep_until, self._state,
            len(self._groups), len(self._channels), self._overflow, self._words, self._words_place,
        )  # fmt: skip

    def _group(self, name: str, ranks: tuple[int, ...]) -> _Row:
        key = (name, ranks)
        if key not in self._groups and (len(self._groups) >= layout.GROUPS - 1 or len(ranks) > layout.RANKS_IN_GROUP):
            self._overflow, key = 1, ("…", ())
        if key not in self._groups:
            row = self._groups[key] = _Row(len(self._groups), key)
            self._new_rows = (row,)  # a group's name is needed even if its first call is a message
        return self._groups[key]

    def _channel(self, group: int, op: str, peer: int | None, tag: int) -> _Row:
        key = (group, op, peer, tag)
        if key not in self._channels and len(self._channels) >= layout.CHANNELS:
            if not self._overflow:
                self._update(_overflow=1)
            return _Row(layout.CHANNELS, key)
        if key not in self._channels:
            self._channels[key] = _Row(len(self._channels), key)
            self._new_rows += (self._channels[key],)
        return self._channels[key]

    def _put_all(self, rows: tuple[_Row, ...], fields: list, marks: bytes = b"\0\0") -> None:
        for row in rows:
            self._put_tally(row)
        if self._new_rows:
            for row in self._new_rows:
                self._put_row(row)
            self._new_rows = ()
            self._put_header()
        self._put(fields, marks)

    def _put_tally(self, row: _Row) -> None:
        if len(row.key) == 2:
            at = layout.GROUPS_AT + row.index * layout.ROW["group"]
        else:
            at = layout.CHANNELS_AT + row.index * layout.ROW["channel"]
        if len(row.key) == 2 or row.index < layout.CHANNELS:
            layout.TALLY.pack_into(self._memory, at, row.count, row.digest)

    def _put_row(self, row: _Row) -> None:
        if len(row.key) == 2:
            name, ranks = row.key
            padded = (*ranks, *[0] * (layout.RANKS_IN_GROUP - len(ranks)))
            at = layout.GROUPS_AT + row.index * layout.ROW["group"]
            layout.GROUP.pack_into(self._memory, at, row.count, row.digest, len(ranks), _fit(name, 64), *padded)
        else:
            group, op, peer, tag = row.key
            at = layout.CHANNELS_AT + row.index * layout.ROW["channel"]
            sender = -1 if peer is None else peer
            layout.CHANNEL.pack_into(self._memory, at, row.count, row.digest, sender, tag, group, layout.P2P.index(op))

    def _put(self, fields: list, marks: bytes = b"\0\0") -> None:
        index, sequence, num_bytes, digest, root, tag, group, flags, shape, op, dtype, reduce_op, *rest = fields
        tensor, place, path = rest
        body = layout.BODY.pack(
            index, sequence, num_bytes, digest, path, -1 if root is None else root, tag, group, flags, len(shape),
            *shape, *[0] * (8 - len(shape)), _fit(op, 32), _fit(dtype, 16), _fit(reduce_op, 16), _fit(tensor, 88),
            _fit(place, 192, keep_end=True),
        )  # fmt: skip
        at = layout.RECORDS_AT + index % layout.CAPACITY * layout.ROW["record"]
        record = layout.MARKS.pack(zlib.crc32(body), *marks) + body
        self._memory[at : at + len(record)] = record


def _fit(text: str, size: int, keep_end: bool = False) -> bytes:
    raw = text.encode()
    if len(raw) <= size:
        return raw
    mark = "…".encode()
    return mark + raw[len(mark) - size :] if keep_end else raw[: size - len(mark)] + mark


def _next_digest(digest: int, what: tuple) -> int:
    return int.from_bytes(blake2b(repr((digest, what)).encode(), digest_size=8).digest(), "little")
