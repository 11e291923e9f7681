"""What crashes leave of exercise 4.5's checkpoints: a full disk, a rank killed in mid-write, all of them at any change.

In copies of the folder that the first run left. What is loaded afterwards is the newest whole checkpoint, and the next
save works over what was left behind. Left out: values and bytes of a save that ends well (`checkpoint`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import labkit.labs.lab04.checkpoint_cases as cases
import labkit.labs.lab04.checkpoint_ranks as ranks
import labkit.labs.lab04.checkpoint_told as told
from labkit.check import evidence
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab04.checkpoint_cases import NUM_RANKS, Content

ALLOWED = ("file_used", "numpy_used", "shared_memory_used")  # saving is with files, and loading may map them
STATES = 16  # of one save, crash states to load from, at most


def verdict(
    cls: Callable, rng: random.Random, base: str, contents: list[Content], first: Observed
) -> Verdict | None:
    """A full disk and a kill, each in a copy of the folder; then, on 2 ranks, loads from those and from all states that
    the first run's saves went through but the first, and a save over what the kill left behind.
    """
    moved, (*_, old, third) = os.path.join(base, "moved"), contents
    full, killed = (cases.copied(moved, os.path.join(base, name)) for name in ("full", "killed"))
    limit = third.shards(0, NUM_RANKS)["parameters"].nbytes // 2
    tried = f"step {third.step}, into a folder that has step {old.step}"
    found = _limited(cls, full, third, [limit] * NUM_RANKS, False, f"{tried}; the disk is full in mid-save")
    if found is not None:
        return found
    # Neither the first nor the last, which often do what is done once; and none of the two ranks that save next: what
    # it wrote in part is not written anew.
    one = NUM_RANKS // 2
    limits = [limit if rank == one else 0 for rank in range(NUM_RANKS)]
    found = _limited(cls, killed, third, limits, True, f"{tried}; rank {one} is killed in mid-save")
    if found is not None:
        return found
    states = _states(base, first, rng)
    folders = [("killed", killed), ("full", full), *((name, path) for name, path, *_ in states), ("moved", moved)]
    again = given(third, 2)
    rank_args = [(rank, (killed, again[rank])) for rank in range(2)]
    observed = evidence.observe(ranks.load_all, 2, args=(cls, folders), rank_args=rank_args, deadline_s=40.0)
    return _after(base, contents, observed, states, one) or honest(without_files(observed), tried)


def _limited(
    cls: Callable, folder: str, content: Content, limits: list[int], kill: bool, tried: str
) -> Verdict | None:
    mine = given(content, NUM_RANKS)
    rank_args = [(folder, rank, mine[rank], limits[rank], kill) for rank in range(NUM_RANKS)]
    observed = evidence.observe(ranks.save_limited, NUM_RANKS, args=(cls,), rank_args=rank_args)
    if observed.outcome.cause is not None:
        return None
    if kill:
        sentence = "a rank wrote its part without writing it: no file of it grew beyond half of its largest shard."
        return wrong("evidence", "elsewhere", sentence, tried, "every rank returned", "a rank killed in mid-write")
    sentence = "save() could not write and says nothing: let the error through, or nobody knows that nothing is saved."
    return wrong("evidence", "error_swallowed", sentence, tried, "save() returned", "an error")


def _states(base: str, first: Observed, rng: random.Random) -> list[tuple]:
    """Crash states of the saves after the first: (item, folder, event, file, number of the save), each content once."""
    every = []
    for number in range(1, 1 + len(first.results[0]["states"])):
        found, seen = [], set()
        listed = [each for result in first.results for each in result["states"][number - 1]]
        for name, event, file in sorted(listed, key=lambda each: each[1] != "emptied"):
            path = os.path.join(base, "states", name)
            digest = cases.digest(path)
            if digest not in seen:
                seen.add(digest)
                found.append((path, event, file, number))
        rest = found[STATES - 1 :]
        every += [(*state, number) for state in _overwritten(base, first, number)[:3]]
        every += found[: STATES - 1] + ([rng.choice(rest)] if rest else [])
    return [(f"state {place}", *state) for place, state in enumerate(every)]


def _overwritten(base: str, first: Observed, number: int) -> list[tuple[str, str, str]]:
    """States for files of earlier saves that save `number` wrote into: half of such a file each."""
    found, whole = [], os.path.join(base, "states", f"whole {number}")
    before, after = (first.results[0][when][number - 1] for when in ("before", "after"))
    for name, (inode, changed, size) in before.items():
        now = after.get(name)
        if now is not None and now[0] == inode and now[1] != changed and size and now[2] > 1:
            path = cases.copied(whole, os.path.join(base, f"torn-{number}-{len(found)}"))
            cases.truncate(os.path.join(path, name), 0.5)
            found.append((path, "written in place", name))
    return found


def _after(
    base: str, contents: list[Content], observed: Observed, states: list[tuple], one: int
) -> Verdict | None:
    """What was loaded from each folder, in the order in which they were asked for."""
    *_, old, third = contents
    items = ["killed", "full", *(name for name, *_ in states), "moved", "again"]
    if observed.outcome.cause is not None and item(observed) not in items:
        return attempts.ran(observed, ranks.NAME, f"loading on 2 ranks what {NUM_RANKS} saved")
    for name, what in (("killed", f"rank {one} was killed"), ("full", "the disk was full")):
        found = _loaded(observed, name, [old], contents)
        if found is not None:
            gone = _lost(os.path.join(base, "moved"), os.path.join(base, name))
            cause, sentence = told.after_kill(gone, found[2], what)
            return wrong("evidence", cause, sentence, _tried(old, third, what), found[0], found[1])
    for name, _, event, file, number in states:
        before, new = contents[number - 1 : number + 1]
        found = _loaded(observed, name, [new, before], contents)
        if found is not None:
            cause, sentence = told.after_state(event, file)
            tried = _tried(before, new, f"all ranks were killed before {event} of {file or 'a file'}")
            return wrong("evidence", cause, sentence, tried, found[0], found[1])
    found = _loaded(observed, "moved", [old], contents)
    if found is not None:
        sentence = found[3] or f"it was saved on {NUM_RANKS} ranks, its folder moved, and load() fails on 2."
        tried = f"saved on {NUM_RANKS} ranks, loaded on 2"
        return wrong("values", found[2] or "not_resharded", sentence, tried, found[0], found[1])
    found = _loaded(observed, "again", [third], contents)
    if found is None:
        return None
    sentence = "the next save, on 2 ranks, meets what the killed one left behind, and its checkpoint is not whole."
    return wrong("evidence", "leftover", sentence, _tried(old, third, "saved anew after a kill"), *found[:2])


def _loaded(observed: Observed, name: str, due: list[Content], contents: list[Content]) -> tuple | None:
    """None when what was loaded as `name` is one of `due`; else (got, expected, cause, sentence), the last two "" where
    the run failed there.
    """
    failed = observed.outcome.cause
    if failed is not None:
        expected = _either(due)
        return (f"load() fails: {failed.sentence}", expected, "", "") if item(observed) == name else None
    wrongs = [told.wrong_load(each, contents, [seen[name] for seen in observed.results], 2) for each in due]
    if any(each is None for each in wrongs):
        return None
    _, cause, sentence, got, expected = wrongs[0]
    if len(due) > 1:
        expected = _either(due)
    return got, expected, cause, sentence


def _either(due: list[Content]) -> str:
    steps = sorted({each.step for each in due})
    one = " or ".join(f"step {step}" for step in steps)
    return f"{one}, of either save" if len(steps) < len(due) else one


def item(observed: Observed) -> str:
    """What a run was about last, of what its ranks told; where a rank failed, of what that rank did."""
    cause = observed.outcome.cause
    at_fault = cause.rank if cause is not None else None
    told_by = [(rank, values["item"]) for rank, values in observed.outcome.reports if "item" in values]
    items = [each for rank, each in told_by if at_fault is None or rank == at_fault]
    return str(items[-1]) if items else ""


def given(content: Content, world_size: int) -> list[ranks.Given]:
    """By rank, what a save is given."""
    return [(content.step, content.shards(rank, world_size), content.sizes) for rank in range(world_size)]


def _tried(old: Content, new: Content, what: str) -> str:
    return f"saving step {new.step} into a folder that has step {old.step}; {what} in mid-save; then load()"


def _lost(before: str, after: str) -> list[str]:
    """Files that were there before and are gone, or hold something else."""
    gone = []
    for name in cases.files(before):
        one, other = os.path.join(before, name), os.path.join(after, name)
        if os.path.islink(one):
            continue
        try:
            with open(one, "rb") as had, open(other, "rb") as has:
                if had.read() != has.read():
                    gone.append(name)
        except OSError:
            gone.append(name)
    return gone


def without_files(observed: Observed) -> Observed:
    """The same run, without findings of what this exercise asks for: files, and numpy to write them."""
    from labkit.record.integrity import Integrity

    integrity, witnesses = [], []
    for each, heard in zip(observed.integrity, observed.witnesses, strict=True):
        if isinstance(each, Integrity):
            each = replace(each, findings=tuple(f for f in each.findings if f.code not in ALLOWED))
        kept = [one for one in heard if not (type(one) is list and len(one) == 3 and one[0] in ALLOWED)]
        gone = len(heard) - len(kept)
        witnesses.append(tuple(one - gone if type(one) is int else one for one in kept))
        integrity.append(each)
    return replace(observed, integrity=tuple(integrity), witnesses=tuple(witnesses))
