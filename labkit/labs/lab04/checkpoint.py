"""Judge of exercise 4.5, `ShardedCheckpoint`: every rank saves its own part, and no crash loses what was whole.

Saved on 4 ranks, one step twice, loaded on 4, 2 and 3: values, with padding dropped and made anew. Evidence: no shard
travels, a rank writes little more than its own bytes, the folder may be moved. Then what goes wrong: the disk is full,
a rank is killed in mid-write (`checkpoint_ranks`), all are killed at any change of the folder that shows; what is
loaded afterwards is the newest whole checkpoint, and the next save works over what was left behind. Files are allowed
here, what else counts as a cheat is not. Left out: power failures, which need fsync, and disks that lose what they
have.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable

import labkit.labs.lab04.checkpoint_cases as cases
import labkit.labs.lab04.checkpoint_crashes as crashes
import labkit.labs.lab04.checkpoint_ranks as ranks
import labkit.labs.lab04.checkpoint_told as told
from labkit.check import evidence
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab04.checkpoint_cases import NUM_RANKS, Content

NAME = ranks.NAME
ROOM_BYTES = 12_288  # beside the shards: a file format's own, names, markers, messages of a barrier


def judge(cls: Callable, seed: int) -> Verdict:
    """Values first, then bytes, then crashes."""
    base = tempfile.mkdtemp(prefix="labkit-checkpoint-")
    try:
        return _judge(cls, random.Random(seed), base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _judge(cls: Callable, rng: random.Random, base: str) -> Verdict:
    contents = cases.contents(rng)
    folder, states = os.path.join(base, "saved"), os.path.join(base, "states")
    given = [crashes.given(content, NUM_RANKS) for content in contents[:3]]
    rank_args = [(folder, states, rank, [each[rank] for each in given]) for rank in range(NUM_RANKS)]
    first = evidence.observe(ranks.save_and_load, NUM_RANKS, args=(cls,), rank_args=rank_args)
    tried = f"saved on {NUM_RANKS} ranks at steps {contents[0].step}, {contents[1].step} again, and {contents[2].step}"
    found = _ran(first, tried) or _first_values(contents, first, tried)
    if found is not None:
        return found
    moved = os.path.join(base, "moved")
    if not os.path.isdir(folder):
        sentence = "the folder that was given is not there after save(): the files went to another place."
        return wrong("evidence", "elsewhere", sentence, tried, "no folder", "all files below the folder")
    os.rename(folder, moved)
    three = _load(cls, moved, 3)
    found = _loaded("moved", contents[2], contents[:2], three, 3, f"{tried}, loaded on 3")
    found = found or _bytes(contents, first, moved, tried) or crashes.verdict(cls, rng, base, contents, first)
    if found is not None:
        return found
    found = honest(crashes.without_files(first), tried) or honest(crashes.without_files(three), tried)
    if found is not None:
        return found
    size = sum(size for *_, size in cases.files(moved).values())
    return right(
        f"saved on {NUM_RANKS} ranks, loaded on 2, 3 and 4; {size:,} bytes in all; a kill in mid-write and a full disk "
        "left the old one, and the next save worked"
    )


def _load(cls: Callable, folder: str, n: int) -> Observed:
    return evidence.observe(ranks.load_all, n, args=(cls, [("moved", folder)]), rank_args=[(r, None) for r in range(n)])


def _ran(observed: Observed, tried: str) -> Verdict | None:
    failed = attempts.ran(observed, NAME, tried)
    if failed is None or failed.cause in attempts.CAUSES:
        return failed
    item = crashes.item(observed)
    if item.startswith("load") and "FileNotFoundError" in failed.sentence:
        sentence = (
            "load() finds no file right after save() has returned on that rank: save() may return on no rank before "
            "the checkpoint stands (a barrier last), and load() looks where save() has put it."
        )
        return wrong("attempted", "not_there", f"{sentence} {failed.sentence}", tried, failed.got, failed.expected)
    if item == "save 1":
        sentence = "a step that was saved before is saved again, as when training went back, and save() fails."
        return wrong("attempted", "second_save", f"{sentence} {failed.sentence}", tried, failed.got, failed.expected)
    if item in ("load 1", "load 2"):
        which = "the same" if item == "load 1" else "another"
        sentence = f"save() at {which} step, into the same folder, left what load() cannot read."
        return wrong("attempted", "second_save", f"{sentence} {failed.sentence}", tried, failed.got, failed.expected)
    return failed


def _first_values(contents: list[Content], observed: Observed, tried: str) -> Verdict | None:
    for rank, seen in enumerate(observed.results):
        if seen["empty"] != "FileNotFoundError":
            sentence = f"where nothing was saved yet, load() on rank {rank} {told.emptily(seen['empty'])}."
            return wrong("values", "nothing_saved", sentence, "an empty folder", seen["empty"], "FileNotFoundError")
    for number, content in enumerate(contents[:3]):
        got = [seen["loads"][number] for seen in observed.results]
        found = told.wrong_load(content, contents[:number], got, NUM_RANKS)
        if found is not None:
            cause, sentence = told.at_once(content, got, found[1], found[2])
            return wrong(found[0], cause, sentence, f"{tried}, loaded there at once", *found[3:])
    return None


def _loaded(
    item: str, due: Content, older: list[Content], observed: Observed, n: int, tried: str
) -> Verdict | None:
    """Stages of one load on n ranks, saved on NUM_RANKS."""
    failed = attempts.ran(observed, NAME, tried)
    if failed is not None:
        if failed.cause in attempts.CAUSES:
            return failed
        sentence = f"it was saved on {NUM_RANKS} ranks, its folder moved, and load() fails on {n}."
        cause = "not_resharded" if failed.cause == "raised" else failed.cause
        return wrong("attempted", cause, f"{sentence} {failed.sentence}", tried, failed.got, failed.expected)
    found = told.wrong_load(due, older, [seen[item] for seen in observed.results], n)
    return wrong(found[0], found[1], found[2], tried, *found[3:]) if found is not None else None


def _bytes(contents: list[Content], observed: Observed, folder: str, tried: str) -> Verdict | None:
    """No shard travels, and each rank writes its own part once."""
    due = contents[0].shard_bytes(NUM_RANKS)
    for rank, record in enumerate(observed.records):
        sent = record.sent_bytes if record is not None else 0
        if sent > ROOM_BYTES / 2:
            largest = max(event.num_bytes for event in record.communications)
            shard = contents[0].shards(0, NUM_RANKS)["parameters"].nbytes
            ready_made = observed.results[rank]["ready_made"]
            cause, sentence = told.travelling(sent, largest >= shard, ready_made)
            ops = ", ".join(evidence.collectives(observed))
            times = f"{len(observed.results[rank]['loads'])} saves and as many loads"
            got = f"rank {rank} sends {sent:,} bytes ({ops}) in {times}"
            return wrong("evidence", cause, sentence, tried, got, "nothing but a few numbers")
    size = sum(size for *_, size in cases.files(folder).values())
    whole = sum(tensor.nbytes for tensor in contents[0].tensors.values())
    if size < whole:
        sentence = "the folder holds less than the tensors have: something was kept elsewhere, or narrowed."
        return wrong("evidence", "elsewhere", sentence, tried, f"{size:,} bytes", f"at least {whole:,}")
    for rank, seen in enumerate(observed.results):
        wrote = seen["written"][0]
        if wrote is not None and wrote > 1.5 * due + ROOM_BYTES:
            cause, sentence = told.too_much_written(wrote, due, rank, [s["written"][0] for s in observed.results])
            got = f"rank {rank} writes {wrote:,} bytes in a save"
            return wrong("evidence", cause, sentence, tried, got, f"its shards' {due:,}, and little more")
    return None
