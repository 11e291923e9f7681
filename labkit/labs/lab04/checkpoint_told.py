"""What a wrong load of exercise 4.5 tells: which known mistake would give it. In the parent, on what ranks gave back.

Left out: what was written (`checkpoint`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.check.compare import kind
from labkit.labs.lab00.inputs import head, same
from labkit.labs.lab04.checkpoint_cases import NUM_RANKS, Content, part_of

Found = tuple[str, str, str, str, str]  # stage, cause, sentence, got, expected


def emptily(what: str) -> str:
    """A sentence's end for what load() did where there is nothing."""
    if what.startswith("returned"):
        return f"{what}: raise FileNotFoundError, so that training knows to start anew"
    return f"raises {what}: FileNotFoundError says that there is no checkpoint"


def wrong_load(due: Content, others: Sequence[Content], got: Sequence[Any], n: int) -> Found | None:
    """What is wrong with the loads of n ranks, of which `due` was expected; None when nothing is.

    others: what else was saved in that folder.
    """
    for rank, out in enumerate(got):
        if isinstance(out, str):
            cause = "half_attempted" if out == "NotImplemented" else "wrong_type"
            return "shape", cause, f"load() on rank {rank} gave {out}, not (step, shards).", out, "(step, dict)"
        step, shards = out
        if not isinstance(step, int):
            return "shape", "wrong_type", f"the step that rank {rank} loads is {step}.", step, "an int"
        found = _step(due, others, rank, step) if step != due.step else None
        found = found or _kinds(due, shards, rank, n) or _values(due, others, shards, rank, n)
        if found is not None:
            return found
    return None


def _step(due: Content, others: Sequence[Content], rank: int, step: int) -> Found:
    older = {each.step for each in others if each.step != due.step}
    got, expected = f"rank {rank}: step {step}", f"step {due.step}"
    if step in older and str(step) > str(due.step) and len(str(step)) < len(str(due.step)):
        sentence = f"step {step} is taken for newer than {due.step}: as text it is. Compare numbers."
        return "values", "text_order", sentence, got, expected
    if step in older:
        sentence = f"rank {rank} loads step {step}, and {due.step} was saved since: is it the newest whole one?"
        return "values", "older_step", sentence, got, expected
    return "values", "wrong_step", f"rank {rank} loads step {step}, which is not that of what was saved.", got, expected


def _kinds(due: Content, shards: dict[str, Any], rank: int, n: int) -> Found | None:
    wanted = due.shards(rank, n)
    if set(shards) != set(wanted):
        names = ", ".join(sorted(shards))
        sentence = f"rank {rank} loads other names than were saved."
        return "shape", "wrong_names", sentence, names, ", ".join(sorted(wanted))
    for name, part in wanted.items():
        mine = shards[name]
        if isinstance(mine, str):
            return "shape", "wrong_type", f"rank {rank}'s {name} is {mine}, not a tensor.", mine, kind(part)
        if kind(mine) == kind(part):
            continue
        got, expected = f"rank {rank}, {name}: {kind(mine)}", kind(part)
        if mine.dtype != part.dtype:
            sentence = f"{name} was saved as {str(part.dtype)[6:]} and comes back as {str(mine.dtype)[6:]}."
            return "shape", "dtype_lost", sentence, got, expected
        whole = due.tensors[name]
        if n != NUM_RANKS and mine.numel() == part_of(whole, 0, NUM_RANKS).numel():
            sentence = f"rank {rank} of {n} gets the part of one of {NUM_RANKS} ranks: cut the whole tensor anew."
            return "shape", "not_resharded", sentence, got, expected
        if mine.numel() in (whole.numel(), NUM_RANKS * part_of(whole, 0, NUM_RANKS).numel()):
            sentence = f"rank {rank} of {n} gets all of {name}: its part is due."
            return "shape", "whole_tensor", sentence, got, expected
        sentence = (
            f"rank {rank}'s part of {name} has another size: drop the padding that {NUM_RANKS} ranks had, cut into {n} "
            "equal parts, and pad the last ones with zeros."
        )
        return "shape", "padding", sentence, got, expected
    return None


def _values(due: Content, others: Sequence[Content], shards: dict[str, Any], rank: int, n: int) -> Found | None:
    wanted = due.shards(rank, n)
    for name, part in wanted.items():
        mine = shards[name]
        if same(mine, part):
            continue
        got, expected = f"rank {rank}, {name}: {head(mine)}", head(part)
        for other in range(n):
            if other != rank and same(mine, due.shards(other, n)[name]):
                sentence = f"rank {rank} loads rank {other}'s part of {name}."
                return "values", "other_ranks_part", sentence, got, expected
        for other in others:
            if other is due or not same(mine, other.shards(rank, n)[name]):
                continue
            sentence = f"this is step {due.step} by name, and {name} is that of step {other.step}."
            if other.step != due.step:
                return "values", "mixed", sentence, got, expected
            sentence = (
                f"step {due.step} was saved twice, and {name} is what the other save was given: a step that is there "
                "already is saved all the same, and the newer save counts."
            )
            return "values", "not_saved_again", sentence, got, expected
        for other in others:
            if other is not due and _partly(mine, part, other.shards(rank, n)[name]):
                which = f"of step {due.step} and partly of step {other.step}"
                which = which if other.step != due.step else f"of one save of step {due.step}, partly of another"
                return "values", "mixed", f"{name} is partly {which}.", got, expected
        size = part.numel() - max(0, min(part.numel(), (rank + 1) * part.numel() - due.tensors[name].numel()))
        if same(mine[:size], part[:size]):
            return "values", "padding", f"rank {rank}'s padding of {name} is not zero.", got, expected
        return "values", "wrong_values", f"rank {rank}'s {name} is not what was saved.", got, expected
    return None


def _partly(mine: Any, one: Any, other: Any) -> bool:
    """Whether each element is that of `one` or that of `other`, and some of each."""
    ones, others = mine == one, mine == other
    return bool((ones | others).all()) and bool(ones.any()) and bool(others.any())


def at_once(due: Content, got: Sequence[Any], cause: str, sentence: str) -> tuple[str, str]:
    """(cause, sentence) for a wrong load right after save() returned: where some ranks load the newest and others an
    older one, they had not waited.
    """
    newest = [rank for rank, out in enumerate(got) if not isinstance(out, str) and out[0] == due.step]
    if cause not in ("older_step", "text_order") or not newest:
        return cause, sentence
    return "returns_early", (
        f"{sentence} Rank {newest[0]} loads step {due.step}: save() may return on no rank before the checkpoint stands "
        "(a barrier last)."
    )


def travelling(sent: int, whole: bool, ready_made: bool) -> tuple[str, str]:
    """(cause, sentence) for many bytes that a rank sends.

    whole: as much as a shard went in one call. ready_made: torch.distributed.checkpoint was imported.
    """
    if ready_made and not whole:
        return "ready_made", (
            "torch.distributed.checkpoint sends its plans around, and it is what was to be written: each rank writes "
            "its part itself, and os.replace() makes them count."
        )
    if whole:
        return "gathered", "shards travel between ranks: each rank writes what it has, and reads what it needs."
    return "gathered", (
        f"{sent:,} bytes travel between ranks, in small pieces: each rank writes what it has, and reads what it needs."
    )


def too_much_written(wrote: int, due: int, rank: int, every: Sequence[int]) -> tuple[str, str]:
    """(cause, sentence) for a rank that writes far more than its part."""
    rest = [each for number, each in enumerate(every) if number != rank]
    if all(each > 1.5 * due for each in rest) and wrote > 3 * due:
        return "whole_storage", (
            "a view is saved with the whole storage that it looks into: clone() a shard before torch.save."
        )
    if all(each > 1.5 * due for each in rest):
        return "written_twice", "each rank writes its shards more than once."
    return "one_writes", f"rank {rank} writes the parts of others: each rank is to write its own."


def after_kill(gone: Sequence[str], why: str, what: str) -> tuple[str, str]:
    """(cause, sentence) when the old checkpoint is not what is loaded after an interrupted save.

    gone: files of the old one that are no longer as they were. why: the cause that the values have, "" when it failed.
    """
    if gone:
        return "old_destroyed", (
            f"{what}, and of the old checkpoint {gone[0]} is no longer as it was: write the new one beside it, and "
            "remove the old one only when the new one is whole."
        )
    if why == "mixed":
        sentence = f"{what}, and what is loaded has parts of both: a checkpoint counts only once all parts are there."
        return "mixed", sentence
    return "partial_taken", (
        f"{what}, and the part of a checkpoint that was written by then is taken for one: mark it as whole only after "
        "all ranks are done, and look for the mark."
    )


def after_state(event: str, file: str) -> tuple[str, str]:
    """(cause, sentence) when a crash at this change of the folder leaves nothing to load."""
    if event in ("emptied", "written in place"):
        return "mark_torn", (
            f"a crash while {file} is written leaves it empty or cut: write another file and os.replace() it, which "
            "has no in-between."
        )
    if event in ("os.remove", "os.rmdir"):
        return "gap", (
            f"a crash while {file or 'the old one'} is removed leaves neither the old checkpoint nor the new one to "
            "load: remove the old one when the new one is whole and has its name, not before."
        )
    return "gap", (
        f"a crash at one moment ({event} of {file}) leaves neither the old checkpoint nor the new one to load: there "
        "must be no such moment."
    )
