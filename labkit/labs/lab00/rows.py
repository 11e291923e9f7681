"""Judge of exercise 0.1, `rows_of_rank`: balanced contiguous shards of n rows.

The function is arithmetic, so it is asked many questions at once: on four real ranks about themselves, then
on three ranks about groups of other sizes. A wrong answer is recognised by what known mistakes would return.
Left out: a choice of which ranks hold the extra rows; any ranks may.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import labkit.labs.lab00.attempts as attempts
from labkit.check import evidence
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest

Question = tuple[int, int, int]  # num_rows, rank, world_size
NAME = "rows_of_rank"


def judge(fn: Callable, seed: int) -> Verdict:
    """Sizes are drawn from `seed`; also fewer rows than ranks, and none at all."""
    rng = random.Random(seed)
    sizes = [4 * rng.randint(3, 20) + rest for rest in rng.sample((1, 2, 3), 3)] + [
        4 * rng.randint(3, 20),
        3,
        0,
    ]
    themselves = [[(size, rank, 4) for size in [10, *sizes]] for rank in range(4)]
    found = _ask(fn, themselves) or _ask(fn, _about_others(rng))
    return found or right("every row on exactly one rank, in order, shards equal to within one row")


def _about_others(rng: random.Random) -> list[list[Question]]:
    """Questions on groups of 1 to 9 ranks, dealt to three ranks; none is about the rank that is asked."""
    dealt: list[list[Question]] = [[], [], []]
    for world_size in [1, 9, *rng.sample(range(2, 9), 4)]:
        for size in (world_size - 1, rng.randint(20, 60), 7 * world_size, rng.randint(10**4, 10**5)):
            for rank in range(world_size):
                dealt[(rank + 1) % 3].append((size, rank, world_size))
    return dealt


def _answers(fn: Callable, questions: Sequence[Question]) -> list:
    """Runs in a rank. A stub is told apart from wrong answers, and a question that fails is reported."""
    from labkit.ranks.rank import report

    answers = []
    for num_rows, rank, world_size in questions:
        try:
            answer = attempts.called(fn, "num_rows, rank, world_size", num_rows, rank, world_size)
        except Exception:
            report(num_rows=num_rows, rank=rank, world_size=world_size)
            raise
        if type(answer) is attempts.Unusable:
            return answer
        answers.append(answer)
    return NotImplemented if all(answer is NotImplemented for answer in answers) else answers


def _ask(fn: Callable, questions: list[list[Question]]) -> Verdict | None:
    world_size = len(questions)
    seen = evidence.observe(_answers, world_size, rank_args=[(q,) for q in questions], args=(fn,))
    asked_on = f"on {world_size} ranks"
    failed = _ran(seen, asked_on)
    if failed is not None:
        return failed
    pairs = [zip(mine, answers, strict=True) for mine, answers in zip(questions, seen.results, strict=True)]
    answers = {question: answer for pair in pairs for question, answer in pair}
    return (
        _wrong_type(answers)
        or _wrong_rows(answers)
        or evidence.no_communication(seen, asked_on)
        or honest(seen, asked_on)
    )


def _ran(seen: evidence.Observed, asked_on: str) -> Verdict | None:
    """As `attempts.ran`, with the question that an exception came from."""
    failed = attempts.ran(seen, NAME, asked_on)
    if failed is None or failed.cause in attempts.CAUSES:
        return failed
    for asked, values in seen.outcome.reports:
        if asked == seen.outcome.cause.rank and values.keys() == {"num_rows", "rank", "world_size"}:
            call = _call((values["num_rows"], values["rank"], values["world_size"]))
            return replace(failed, tried=call, sentence=f"{call}: {failed.sentence}")
    return failed


def _call(question: Question) -> str:
    return "rows_of_rank({}, rank={}, world_size={})".format(*question)


def _wrong_type(answers: dict[Question, object]) -> Verdict | None:
    for question, answer in answers.items():
        if type(answer) is range and answer.step == 1:
            continue
        size, rank, world_size = question
        expected = "a range with step 1"
        if answer is None and (size >= world_size or all(each is None for each in answers.values())):
            cause, sentence = "returns_nothing", "nothing came back here: a `return` is missing."
        elif answer is None:
            cause, expected = "none_when_empty", "an empty range"
            sentence = "a rank without rows has an empty range; it is still in the group and goes on like the others."
        elif answer is NotImplemented:
            cause, sentence = "half_attempted", "NotImplemented came back here: this case is still to be written."
        elif type(answer) is range and list(answer[:3]) == list(range(rank, size, world_size))[:3]:
            cause, sentence = "strided", _SENTENCES["strided"]
        else:
            cause, sentence = "not_a_range", "the answer is a range of row numbers, range(start, stop)."
        return wrong("shape", cause, sentence, _call(question), answer, expected)
    return None


def _wrong_rows(answers: dict[Question, range]) -> Verdict | None:
    groups = sorted({(size, world_size) for size, _, world_size in answers}, key=lambda g: (g[0] != 10, g[1]))
    for size, world_size in groups:
        shards = [answers[size, rank, world_size] for rank in range(world_size)]
        problem = _problem(shards, size)
        if problem is not None:
            cause, sentence = _known_mistake(answers) or problem
            tried = f"{size} rows on {world_size} rank{'s' * (world_size > 1)}"
            return wrong("values", cause, sentence, tried, ", ".join(map(_rows, shards)), _example(size, world_size))
    return None


def _length(shard: range) -> int:
    """As len(), which raises OverflowError from 2**63 rows up."""
    return max(0, shard.stop - shard.start)


def _rows(shard: range) -> str:
    """The rows of a shard in words, the last one included: "3 to 5"."""
    if _length(shard) < 2:
        return str(shard.start) if shard else "none"
    return f"{shard.start} to {shard.stop - 1}"


def _problem(shards: Sequence[range], size: int) -> tuple[str, str] | None:
    """What is wrong with the shards of one group, whoever made them; None when they are right."""
    held = [shard for shard in shards if _length(shard)]
    sizes = [_length(shard) for shard in shards]
    stray = [shard for shard in held if shard.start < 0 or shard.stop > size]
    if stray:
        last = f"the last row is row {size - 1}" if size else "there are no rows at all"
        return "past_the_end", f"not all of rows {_rows(stray[0])} are in the data: {last}."
    if sum(sizes) > size:
        return "rows_repeated", "some rows are on more than one rank: they would count twice."
    if sum(sizes) < size:
        return "rows_missing", "some rows are on no rank: they would never be used."
    in_order = sorted(held, key=lambda shard: shard.start)
    if any(a.stop > b.start for a, b in zip(in_order, in_order[1:], strict=False)):
        return "repeated_and_missing", "some rows are on more than one rank, and as many are on none."
    if in_order != held:
        sentence = "rank 0 has the first rows, and each next rank goes on where the last one stopped."
        return "out_of_order", sentence
    if max(sizes) - min(sizes) > 1:
        return "unbalanced", f"shards of {max(sizes)} and {min(sizes)} rows: sizes may differ by one at most."
    return None


def _mistake(name: str, size: int, rank: int, world_size: int) -> range:
    """What a known mistake returns."""
    base, extra = divmod(size, world_size)
    chunk, own = -(-size // world_size), base + (rank < extra)
    start = rank * base + min(rank, extra)
    mirrored = world_size - 1 - rank
    mirrored_start = mirrored * base + min(mirrored, extra)
    return {
        "replicated": range(size),
        "drops_remainder": range(rank * base, (rank + 1) * base),
        "last_takes_rest": range(rank * base, size if rank == world_size - 1 else (rank + 1) * base),
        "ceil_chunks": range(min(rank * chunk, size), min((rank + 1) * chunk, size)),
        "past_the_end": range(rank * chunk, (rank + 1) * chunk),
        "start_ignores_extra": range(rank * base, rank * base + own),
        "own_size_times_rank": range(rank * own, (rank + 1) * own),
        "rank_from_one": range(start - base - (rank - 1 < extra), start),
        "inclusive_stop": range(start, start + own - 1),
        "no_empty_shard": range(start, start + max(1, own)),
        "reversed_order": range(mirrored_start, mirrored_start + base + (mirrored < extra)),
        "strided": range(rank, size, world_size),
    }[name]


_SENTENCES = {
    "replicated": "every rank has all the rows: that is the serial program run several times over.",
    "drops_remainder": "num_rows // world_size rows each leaves the remainder on no rank.",
    "last_takes_rest": "the last rank takes the whole remainder: the others would wait for it at every step.",
    "ceil_chunks": "rounding the shard size up leaves too little for the last ranks.",
    "past_the_end": "with the shard size rounded up, the last ranks reach past the last row.",
    "start_ignores_extra": "the ranks before this one hold extra rows too: `start` must make room for them.",
    "own_size_times_rank": "`start` is rank times this rank's own size, but the ranks before it may hold a row more.",
    "rank_from_one": "ranks count from 0, not from 1: rank 0 has the first rows.",
    "inclusive_stop": "a range stops before its `stop`: one row of each rank is lost.",
    "no_empty_shard": "with fewer rows than ranks some have none; an invented row would count twice.",
    "reversed_order": "the shards are balanced but run backwards: rank 0 has the first rows.",
    "strided": "every world_size-th row is balanced but not one contiguous block.",
    "hard_coded": "the same rows come back for any number of rows: the example's answer by heart.",
    "world_size_fixed": "it works for 4 ranks only: use the argument world_size.",
    "ignores_arguments": "the answer follows the group it runs in, not the rank and world_size it was given.",
}


def _known_mistake(answers: dict[Question, range]) -> tuple[str, str] | None:
    """The known mistake that explains all answers at once, if there is one."""
    sizes_of = {size for size, _, world_size in answers if world_size == 4}
    shown = [answers.get((10, rank, 4)) for rank in range(4)]
    if 10 in sizes_of and _problem(shown, 10) is None and all(answers[q] == shown[q[1]] for q in answers):
        return "hard_coded", _SENTENCES["hard_coded"]
    for cause, sentence in _SENTENCES.items():
        if cause in ("hard_coded", "world_size_fixed", "ignores_arguments"):
            continue
        if all(answer == _mistake(cause, *question) for question, answer in answers.items()):
            return cause, sentence
    if 10 in sizes_of:
        return None
    if any(_as_for(4, answers)):
        return "world_size_fixed", _SENTENCES["world_size_fixed"]
    if any(_as_for(3, answers)) or _follows_the_group(answers):
        return "ignores_arguments", _SENTENCES["ignores_arguments"]
    return None


def _as_for(ranks: int, answers: dict[Question, range]) -> list[bool]:
    """Per right way to cut rows into shards: do all answers follow it for `ranks` ranks, whatever was asked?"""

    def larger_first(size: int, rank: int) -> range:
        base, extra = divmod(size, ranks)
        start = rank * base + min(rank, extra)
        return range(start, start + base + (rank < extra))

    def rounded(size: int, rank: int) -> range:
        return range(rank * size // ranks, (rank + 1) * size // ranks)

    return [all(answer == way(q[0], q[1]) for q, answer in answers.items()) for way in (larger_first, rounded)]


def _follows_the_group(answers: dict[Question, range]) -> bool:
    """Three ranks were asked about other groups: did each answer for itself?"""
    held: dict[tuple[int, int], set[range]] = {}
    for (size, rank, _), answer in answers.items():
        held.setdefault((size, (rank + 1) % 3), set()).add(answer)
    return all(len(shards) == 1 for shards in held.values())


def _example(size: int, world_size: int) -> str:
    base, extra = divmod(size, world_size)
    sizes = [base + 1] * extra + [base] * (world_size - extra)
    return f"shards of {', '.join(map(str, sizes))} rows, in this order or another"
