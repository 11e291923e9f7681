"""Judge of exercise 2.4, `shard_sampler`: every sample once per epoch, in steps that all ranks take together.

The function is arithmetic and a shuffle, so it is asked many questions at once: on four real ranks about themselves,
then on three about groups of other sizes. Every step but the last holds world_size * batch_size samples over all
ranks. In the last one any split among ranks is right, as long as none has more than batch_size and the weights are
the shares. Which sample stands where within a step is not asked: the gradient is a mean. Left out: what a known
mistake would return sample by sample, for shuffles differ; mistakes are known by what is repeated, missing or short.
Out of reach: an order drawn from the hour, alike while the check runs, and one that only looks shuffled, such as
every seventh sample.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import labkit.labs.lab00.attempts as attempts
import labkit.labs.lab02.sampler_plain as plain
import labkit.labs.lab02.sampler_told as told
from labkit.check import evidence
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab02.sampler_told import Group, Step

NAME = "shard_sampler"
ARGUMENTS = "num_samples, batch_size, rank, world_size, epoch, seed"


@dataclass(frozen=True)
class Question:
    """One call. seed None: the call leaves it to its default, 0."""

    group: Group
    rank: int
    seed_given: bool = True

    @property
    def args(self) -> tuple[int, ...]:
        g = self.group
        found = (g.num_samples, g.batch_size, self.rank, g.world_size, g.epoch, g.seed)
        return found if self.seed_given else found[:-1]

    def __str__(self) -> str:
        return told.call(self.group, self.rank, self.seed_given)


def judge(fn: Callable, seed: int) -> Verdict:
    """Sizes, epochs and seeds are drawn from `seed`; also exact multiples, fewer samples than ranks, and none."""
    rng = random.Random(seed)
    themselves, others = _about_themselves(rng), _about_others(rng)
    found = _ask(fn, themselves) or _ask(fn, others)
    return found or right(
        "every sample once per epoch, in another order each time; every rank takes every step, with its share as weight"
    )


def _about_themselves(rng: random.Random) -> list[list[Question]]:
    """Each of four ranks is asked about itself; the first question twice more, once without a seed."""
    batch, k = rng.randint(3, 5), rng.randint(3, 5)
    first = Group(4 * batch * k + rng.randint(1, 3), batch, 4, 0, 0)  # some rank has no last batch
    later, seeded = replace(first, epoch=1), replace(first, seed=rng.randint(10**3, 10**6))
    groups = [
        first,
        later,
        replace(first, epoch=rng.randint(2, 9)),
        seeded,
        replace(seeded, epoch=1),
        Group(4 * batch * (k + 1) - 1, batch, 4, rng.randint(0, 9), seeded.seed),
        Group(4 * batch * k, batch, 4, 3, 0),
        Group(rng.randint(1, 3), batch, 4, 0, 1),
        Group(4 * k + rng.randint(1, 3), 1, 4, 1, 2),
        Group(0, batch, 4, 0, 0),
    ]
    again = [(first, False), (seeded, True)]
    asked = [*((group, True) for group in groups), *again]
    return [[Question(group, rank, given) for group, given in asked] for rank in range(4)]


def _about_others(rng: random.Random) -> list[list[Question]]:
    """Groups of 1 to 9 ranks, dealt to three ranks; none is about the rank that is asked."""
    dealt: list[list[Question]] = [[], [], []]
    for world_size in (1, 2, 9, *rng.sample(range(3, 9), 2)):
        batch = rng.randint(2, 4)
        full = world_size * batch
        for num_samples in (3 * full + rng.randint(1, full - 1), 2 * full, world_size - 1):
            group = Group(num_samples, batch, world_size, rng.randint(0, 5), rng.randint(0, 99))
            for rank in range(world_size):
                dealt[(rank + 1) % 3].append(Question(group, rank))
    return dealt


def _answers(fn: Callable, questions: Sequence[Question], noise: int) -> Any:
    """Runs in a rank: (answers in plain numbers, questions that changed a global random generator, texts hashed).

    noise: seeds the global generators, otherwise alike on all ranks, so that an order drawn from them differs. So does
    the hash of a text, as it would between processes that were started one by one.
    """
    from labkit.ranks.rank import report

    _stir(noise)
    hashed = _salt_hash(fn, noise)
    answers, disturbed = [], []
    for number, question in enumerate(questions):
        before = _generators()
        try:
            names = ARGUMENTS if question.seed_given else ARGUMENTS.removesuffix(", seed")
            answer = attempts.called(fn, names, *question.args)
        except Exception:
            report(asked=str(question))
            raise
        if attempts.no_result(answer):
            return answer
        if _generators() != before:
            disturbed.append(number)
        answers.append(plain.answer(answer))
    return answers, disturbed, len(hashed)


def _salt_hash(fn: Callable, salt: int) -> list[int]:
    """Gives the module of `fn` a `hash` that salts texts, as PYTHONHASHSEED does; ints stay. It counts texts.

    The ranks of a check were forked and have one salt; under torchrun each has its own.
    """
    hashed: list[int] = []

    def salted(value: Any) -> int:
        if not _holds_text(value):
            return hash(value)
        hashed.append(1)
        return hash((salt, value))

    space = getattr(fn, "__globals__", None)
    if type(space) is dict and "hash" not in space:
        space["hash"] = salted
    return hashed


def _holds_text(value: Any) -> bool:
    return isinstance(value, (str, bytes)) or (isinstance(value, (tuple, frozenset)) and any(map(_holds_text, value)))


def _stir(noise: int) -> None:
    import numpy as np
    import torch

    random.seed(noise)
    torch.manual_seed(noise)
    np.random.seed(noise)


def _generators() -> tuple:
    """The state of the three generators that a training draws from."""
    import numpy as np
    import torch

    _, numpys, position, *rest = np.random.get_state()
    return random.getstate(), torch.get_rng_state().tolist(), numpys.tolist(), position, rest


def _ask(fn: Callable, questions: list[list[Question]]) -> Verdict | None:
    world_size = len(questions)
    asked_on = f"on {world_size} ranks"
    rank_args = [(mine, 1000 + rank) for rank, mine in enumerate(questions)]
    seen = evidence.observe(_answers, world_size, args=(fn,), rank_args=rank_args)
    failed = _ran(seen, asked_on)
    if failed is not None:
        return failed
    asked = [each for mine in questions for each in mine]
    answers = [answer for mine, _, _ in seen.results for answer in mine]
    return (
        _wrong_type(asked, answers)
        or _not_repeatable(asked, answers)
        or _hashes_texts(_wrong_steps(asked, answers), any(hashed for _, _, hashed in seen.results))
        or _undisturbed(questions, seen)
        or evidence.no_communication(seen, asked_on)
        or honest(_numpy_allowed(seen), asked_on)
    )


def _ran(seen: evidence.Observed, asked_on: str) -> Verdict | None:
    """As `attempts.ran`, with the question that an exception came from."""
    failed = attempts.ran(seen, NAME, asked_on)
    if failed is None or failed.cause in attempts.CAUSES:
        return failed
    for rank, values in seen.outcome.reports:
        if rank == seen.outcome.cause.rank and "asked" in values:
            return replace(failed, tried=str(values["asked"]))
    return failed


def _wrong_type(asked: list[Question], answers: list) -> Verdict | None:
    for question, answer in zip(asked, answers, strict=True):
        if type(answer) is list and all(type(step) is tuple for step in answer):
            bad = next((step for step in answer if not math.isfinite(step[1])), None)
            if bad is not None:
                got = f"weight {bad[1]} for {len(bad[0])} samples"
                return wrong("values", "not_finite", told.NOT_FINITE, str(question), got, "a share, from 0 to 1")
            continue
        got = answer if type(answer) is str else next(step for step in answer if type(step) is not tuple)
        cause, sentence = told.wrong_type(got, type(answer) is list)
        return wrong("shape", cause, sentence, str(question), got, "a list of (indices, weight)")
    return None


def _hashes_texts(found: Verdict | None, hashed: bool) -> Verdict | None:
    """Ranks that hashed a text and do not agree on an order: that is why."""
    if found is None or not hashed or found.cause not in told.DISAGREE:
        return found
    sentence = "hash() of a text differs from process to process, and so does the order: hash numbers, (seed, epoch)."
    return replace(found, cause="text_hashed", sentence=sentence)


def _not_repeatable(asked: list[Question], answers: list) -> Verdict | None:
    """The same (seed, epoch) gives the same order, also where the seed is left to its default, 0."""
    first: dict[tuple[Group, int], list[Step]] = {}
    for question, answer in zip(asked, answers, strict=True):
        before = first.setdefault((question.group, question.rank), answer)
        if before != answer:
            cause, sentence = "not_repeatable", "the same call gives another order: draw it from seed and epoch alone."
            if not question.seed_given:
                sentence = f"{question} and the same with seed 0 differ: draw the order from seed and epoch alone."
            return wrong("values", cause, sentence, str(question), answer[:1], before[:1])
    return None


def _wrong_steps(asked: list[Question], answers: list) -> Verdict | None:
    by_group: dict[Group, list[list[Step]]] = {}
    for question, answer in sorted(zip(asked, answers, strict=True), key=lambda pair: pair[0].rank):
        ranks = by_group.setdefault(question.group, [])
        if len(ranks) == question.rank:
            ranks.append(answer)
    for group, ranks in by_group.items():
        found = told.samples(group, ranks) or told.steps(group, ranks)
        if found is not None:
            cause, sentence, got, expected = _same_for_every_rank(by_group) or found
            return wrong("values", cause, sentence, str(group), got, expected)
    weighed = told.weights(by_group)
    if weighed is not None:
        group, (cause, sentence, got, expected) = weighed
        return wrong("values", cause, sentence, str(group), got, expected)
    return _orders(by_group)


def _same_for_every_rank(by_group: dict[Group, list[list[Step]]]) -> tuple[str, str, str, str] | None:
    """Three real ranks answered for groups of other sizes, ranks 0 and 3 in the same one: did it answer for itself?"""
    for group, ranks in by_group.items():
        rest = group.world_size - 3
        if rest >= 2 and any(ranks) and all(ranks[rank] == ranks[rank + 3] for rank in range(rest)):
            sentence = "the answer follows the group it runs in, not the rank and world_size it was given."
            return "ignores_arguments", sentence, "the same for ranks 0 and 3", "other samples on each rank"
    return None


def _orders(by_group: dict[Group, list[list[Step]]]) -> Verdict | None:
    """Which samples share a step must differ between epochs and seeds."""
    drawn = {group: told.order(ranks) for group, ranks in by_group.items() if told.orders_can_differ(group)}
    for group, order in drawn.items():
        if order == told.unshuffled(group):
            sentence = "the samples come as they are stored: shuffle them, by seed and epoch."
            return wrong("values", "not_shuffled", sentence, str(group), told.words(order), "another order")
    hardly = told.hardly_shuffled(drawn)
    if hardly is not None:
        return wrong("values", "hardly_shuffled", hardly[0], "all of these groups", *hardly[1:])
    for what in ("epoch", "seed"):
        for one, other in permutations(drawn, 2):
            if replace(one, **{what: getattr(other, what)}) == other and drawn[one] == drawn[other]:
                got = f"the same steps with {what} {getattr(one, what)} and {getattr(other, what)}"
                return wrong("values", f"{what}_ignored", told.IGNORED[what], str(other), got, "other steps")
    return None


def _undisturbed(questions: list[list[Question]], seen: evidence.Observed) -> Verdict | None:
    for rank, (_, disturbed, _) in enumerate(seen.results):
        for number in disturbed[:1]:
            sentence = (
                "it draws from a global generator, or seeds it: what the training draws next, dropout say, then "
                "repeats every epoch. Make a generator of its own."
            )
            got = "random, numpy.random or torch's default generator is in another state afterwards"
            return wrong("evidence", "global_generator", sentence, str(questions[rank][number]), got, "as it was")
    return None


def _numpy_allowed(seen: evidence.Observed) -> evidence.Observed:
    """The same without the finding that a tensor went to numpy: no tensor counts here, and randperm's may."""
    from labkit.record.integrity import Integrity

    def keep(code: object) -> bool:
        return code != "numpy_used"

    integrity, witnesses = [], []
    for each, said in zip(seen.integrity, seen.witnesses, strict=True):
        if isinstance(each, Integrity):
            each = replace(each, findings=tuple(found for found in each.findings if keep(found.code)))
        left = [one for one in said if type(one) is not list or not one or keep(one[0])]
        gone = len(said) - len(left)
        if gone and left and type(left[-1]) is int:
            left[-1] -= gone
        integrity.append(each)
        witnesses.append(tuple(left))
    return replace(seen, integrity=tuple(integrity), witnesses=tuple(witnesses))
