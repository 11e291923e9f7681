"""A ledger tells what was written, while it is written, after its writer died, and for runs longer than itself."""

import os
import signal
import struct

import pytest

from labkit.ranks import layout, ledger


@pytest.fixture
def fd():
    fd = ledger.create()
    yield fd
    os.close(fd)


def note(book, i=0, **more):
    return book.note("all_reduce", "0", (0, 1), shape=(i,), dtype="float32", num_bytes=4 * i, reduce_op="sum",
                     place=f"train.py:{i}", **more)  # fmt: skip


def test_an_entry_comes_back_as_it_was_written(fd):
    book = ledger.open_in_rank(fd)
    index = book.note("broadcast", "tp", (2, 5), shape=(3, 4), dtype="bfloat16", num_bytes=24, root=5, tag=0,
                      place="/tmp/ipykernel_7/12.py:3", path=99, tensor="w,params['w']")  # fmt: skip
    book.mark(index, "waiting", blocking=True)
    (entry,) = ledger.read(fd).entries
    assert entry == ledger.Entry(
        0, "broadcast", "tp", (2, 5), 0, (3, 4), "bfloat16", 24, 5, "", 0, "waiting", True,
        "/tmp/ipykernel_7/12.py:3", "w,params['w']", 99, digest=entry.digest,
    )  # fmt: skip


def test_an_empty_ledger_is_that_of_a_rank_that_starts(fd):
    empty = ledger.read(fd)
    assert (empty.entries, empty.state, empty.groups, empty.channels, empty.progress) == ((), "starting", (), (), 0)


def test_blocking_stays_when_the_state_moves_on(fd):
    book = ledger.open_in_rank(fd)
    index = note(book)
    assert ledger.read(fd).entries[0].state == "issued"
    book.mark(index, "waiting", blocking=True)
    book.mark(index, "done")
    assert (ledger.read(fd).entries[0].state, ledger.read(fd).entries[0].blocking) == ("done", True)


def test_numbers_run_within_each_group_and_each_channel(fd):
    book = ledger.open_in_rank(fd)
    for group, ranks in (("0", (0, 1)), ("1", (0,)), ("0", (0, 1))):
        book.note("all_reduce", group, ranks)
    for op, peer, tag in (("send", 1, 0), ("send", 1, 5), ("recv", 1, 0), ("send", 1, 0)):
        book.note(op, "0", (0, 1), root=peer, tag=tag)
    book.note("barrier", "0", (0, 1))
    snapshot = ledger.read(fd)
    assert [entry.sequence for entry in snapshot.entries] == [0, 0, 1, 0, 0, 0, 1, 2]
    assert [(tally.group, tally.count) for tally in snapshot.groups] == [("0", 3), ("1", 1)]
    assert [(c.op, c.peer, c.tag, c.count) for c in snapshot.channels] == [
        ("send", 1, 0, 2), ("send", 1, 5, 1), ("recv", 1, 0, 1)]  # fmt: skip


def test_a_long_run_keeps_the_newest_and_counts_all(fd):
    book = ledger.open_in_rank(fd)
    total = layout.CAPACITY + 100
    for i in range(total):
        note(book, i)
    book.mark(0, "waiting")  # overwritten long ago: must not touch its successor
    snapshot = ledger.read(fd)
    assert [entry.index for entry in snapshot.entries] == list(range(100, total))
    assert snapshot.first_index == 100 and snapshot.groups[0].count == total
    assert all(entry.place == f"train.py:{entry.index}" and entry.state == "issued" for entry in snapshot.entries)
    assert [entry.index for entry in ledger.read(fd, last=3).entries] == [total - 3, total - 2, total - 1]


def test_digests_agree_exactly_when_the_calls_agree():
    def digest(*shapes):
        fd = ledger.create()
        book = ledger.open_in_rank(fd)
        for shape in shapes:
            book.note("all_reduce", "0", (0, 1), shape=shape, dtype="float32", place=str(len(shapes)))
        result = ledger.read(fd).groups[0].digest
        os.close(fd)
        return result

    assert digest((4,), (5,)) == digest((4,), (5,))
    assert len({digest((4,), (5,)), digest((5,), (4,)), digest((4,)), digest((20,))}) == 4


def test_progress_moves_with_every_write_and_only_then(fd):
    book = ledger.open_in_rank(fd)
    seen = [ledger.peek(fd)]
    for write in (lambda: note(book), lambda: book.mark(0, "waiting"), lambda: book.sleep_until(5.0),
                  lambda: book.set_state("running"), lambda: book.say_last("os.abort()")):  # fmt: skip
        write()
        assert ledger.peek(fd) == ledger.peek(fd) > seen[-1]
        seen.append(ledger.peek(fd))
    assert ledger.read(fd).progress == seen[-1]


def test_the_header_tells_state_sleep_and_last_words(fd):
    book = ledger.open_in_rank(fd)
    book.set_state("running")
    book.sleep_until(12.5)
    book.say_last("os._exit(3)", "/a/b/train.py:7")
    for snapshot in (ledger.read(fd), ledger.read_header(fd)):
        assert (snapshot.state, snapshot.asleep_until) == ("running", 12.5)
        assert (snapshot.last_words, snapshot.last_words_place) == ("os._exit(3)", "/a/b/train.py:7")
    book.say_last("")
    assert ledger.read(fd).last_words == ""


def test_a_long_path_loses_its_beginning_and_keeps_its_line(fd):
    book = ledger.open_in_rank(fd)
    book.note("barrier", "ü" * 80, (0,), place=f"/{'folder/' * 60}train.py:1234")
    (entry,) = ledger.read(fd).entries
    assert entry.place.startswith("…") and entry.place.endswith("/train.py:1234")
    assert entry.group.startswith("üü") and entry.group.endswith("…")


def test_nine_dims_are_told_apart_from_eight(fd):
    book = ledger.open_in_rank(fd)
    book.note("all_reduce", "0", (0,), shape=(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert ledger.read(fd).entries[0].shape == (1, 2, 3, 4, 5, 6, 7, -1)


def test_a_refused_call_gives_its_number_back(fd):
    book = ledger.open_in_rank(fd)
    before = note(book, 4)
    refused = note(book, 5)
    book.refuse(refused)
    again = note(book, 6)
    entries = ledger.read(fd).entries
    assert [(entries[i].sequence, entries[i].state) for i in (before, refused, again)] == [
        (0, "issued"), (1, "refused"), (1, "issued")]  # fmt: skip
    assert ledger.read(fd).groups[0].count == 2


def test_a_recv_from_any_source_is_counted_where_it_came_from(fd):
    book = ledger.open_in_rank(fd)
    book.note("recv", "0", (0, 1, 2), root=2)
    index = book.note("recv", "0", (0, 1, 2), root=None, any_source=True)
    book.mark(index, "done", blocking=True)
    book.resolve(index, 2)
    entry = ledger.read(fd).entries[1]
    assert (entry.root, entry.sequence, entry.any_source, entry.state, entry.blocking) == (2, 1, True, "done", True)
    assert {c.peer: c.count for c in ledger.read(fd).channels} == {2: 2, None: 0}


def test_more_groups_and_channels_than_rows_say_so(fd):
    book = ledger.open_in_rank(fd)
    for i in range(layout.GROUPS + 5):
        book.note("barrier", f"g{i}", (0, 1))
    for i in range(layout.CHANNELS + 5):
        book.note("send", "g0", (0, 1), root=1, tag=i)
    snapshot = ledger.read(fd)
    assert snapshot.overflow and len(snapshot.channels) == layout.CHANNELS
    assert snapshot.groups[0].group == "g0" and snapshot.groups[-1].ranks == ()
    assert len(snapshot.entries) == layout.GROUPS + layout.CHANNELS + 10


def test_a_record_half_written_is_never_taken_for_a_call(fd):
    book = ledger.open_in_rank(fd)
    for i in range(3):
        note(book, i)
    at = layout.RECORDS_AT + layout.ROW["record"] + 40
    os.pwrite(fd, struct.pack("<Q", 77), at)
    assert [entry.index for entry in ledger.read(fd).entries] == [0, 2]


def test_a_reader_beside_a_writer_sees_only_whole_entries_and_its_last_ones_after_it_is_killed(fd):
    pid = os.fork()
    if pid == 0:
        book = ledger.open_in_rank(fd)
        i = 0
        while True:
            book.mark(note(book, i), "done")
            i += 1
    reads = 0
    try:
        while ledger.peek(fd) < 3 * layout.CAPACITY or reads < 20:
            snapshot = ledger.read(fd, last=200)
            for entry in snapshot.entries:
                assert entry.shape == (entry.index,) and entry.place == f"train.py:{entry.index}"
                assert entry.sequence == entry.index and entry.num_bytes == 4 * entry.index
            reads += bool(snapshot.entries)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    left = ledger.read(fd)
    assert len(left.entries) >= layout.CAPACITY - 1 and left.entries[-1].place == f"train.py:{left.entries[-1].index}"


def test_a_child_of_the_rank_writes_nothing(fd):
    book = ledger.open_in_rank(fd)
    note(book)
    before = ledger.read(fd)
    pid = os.fork()
    if pid == 0:
        note(book)
        book.mark(0, "done")
        book.refuse(0)
        book.say_last("os._exit(9)")
        os._exit(0)
    os.waitpid(pid, 0)
    assert ledger.read(fd) == before


def test_a_fresh_ledger_takes_memory_only_for_what_is_written(fd):
    note(ledger.open_in_rank(fd))
    assert os.fstat(fd).st_size == layout.NUM_BYTES and os.fstat(fd).st_blocks * 512 < layout.NUM_BYTES / 10


def test_without_memfd_an_unlinked_file_serves(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fd = ledger.create()
    note(ledger.open_in_rank(fd), 3)
    assert ledger.read(fd).entries[0].shape == (3,) and not list(tmp_path.iterdir())
    os.close(fd)


def test_threads_of_one_rank_lose_no_entry(fd):
    import threading

    book = ledger.open_in_rank(fd)
    threads = [threading.Thread(target=lambda: [note(book, 1) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.sequence for entry in ledger.read(fd).entries] == list(range(800))
