"""What is wrong with the steps that all ranks of a group were given, and the probable cause in a sentence.

Used by the judge of 2.4. Works on plain lists, in the parent. Each function gives (cause, sentence, got, expected), or
None. Left out: asking the questions (`sampler`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import labkit.labs.lab02.sampler_plain as plain

Step = tuple[list[int], float]  # (indices, weight)
Told = tuple[str, str, str, str]

IGNORED = {
    "epoch": "every epoch has the same steps: the epoch must decide on the order too.",
    "seed": "every seed gives the same steps: another seed is another order.",
}


@dataclass(frozen=True)
class Group:
    """An epoch of a group: what all its ranks are asked about."""

    num_samples: int
    batch_size: int
    world_size: int
    epoch: int
    seed: int

    @property
    def full(self) -> int:
        """Samples of a full step, over all ranks."""
        return self.world_size * self.batch_size

    @property
    def num_steps(self) -> int:
        """Steps of an epoch: every one but the last is full."""
        return math.ceil(self.num_samples / self.full)

    def total(self, step: int) -> int:
        """Samples of a step, over all ranks."""
        return min(self.full, self.num_samples - step * self.full)

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        drawn = f"epoch={self.epoch}, seed={self.seed}"
        return f"{self.num_samples} samples, batch_size={self.batch_size}, {ranks}, {drawn}"


def call(group: Group, rank: int, seed_given: bool = True) -> str:
    """A question as a learner would write it."""
    seed = f", seed={group.seed}" if seed_given else ""
    return (
        f"shard_sampler({group.num_samples}, batch_size={group.batch_size}, rank={rank}, "
        f"world_size={group.world_size}, epoch={group.epoch}{seed})"
    )


def wrong_type(got: str, is_list: bool) -> tuple[str, str]:
    """(cause, sentence) for what is no list of (indices, weight); got: what stands in its place, in words."""
    if got == "None":
        return "returns_nothing", "nothing came back here: a `return` is missing."
    if got.startswith(plain.TOO_MANY):
        return "too_many", "these are more than there are samples."
    if got.startswith(plain.TOO_LARGE):
        return "past_the_end", "there are no such samples: they are numbered from 0 to num_samples - 1."
    if not is_list:
        return "not_a_list", "the answer is a list of steps, each (indices, weight)."
    if "tensor" in got:
        return "tensor_indices", "indices and weight are plain numbers here, not tensors: tolist(), item()."
    if got.startswith("an int"):
        return "no_steps", "these are samples, not steps: cut them into batches, each with its weight."
    if got.endswith(plain.WHOLE):
        return "no_weight", "a step is (indices, weight): the weight is missing."
    if not got.startswith("("):
        return "wrong_step", "a step is (indices, weight), one tuple for each: neither more, nor two lists of all."
    return "wrong_step", "a step is (indices, weight): a list of whole numbers, and a float."


def samples(group: Group, ranks: Sequence[Sequence[Step]]) -> Told | None:
    """Every sample once over all ranks, and none that does not exist."""
    held = [[index for indices, _ in steps for index in indices] for steps in ranks]
    counts = Counter(index for mine in held for index in mine)
    n = group.num_samples
    stray = sorted(index for index in counts if not 0 <= index < n)
    repeated = sorted(index for index, count in counts.items() if count > 1)
    missing = [index for index in range(n) if index not in counts]
    due = f"{n} samples, each once"
    if stray:
        last = f"samples are numbered from 0 to {n - 1}" if n else "there are no samples at all"
        return "past_the_end", f"sample {stray[0]} does not exist: {last}.", f"sample {stray[0]}", due
    if repeated and all(mine == held[0] for mine in held):
        return "replicated", "every rank has the same samples: each is to have its own.", f"{n} samples on each", due
    got = f"{sum(counts.values())} samples, {len(repeated)} more than once, {len(missing)} of them missing"
    if repeated and missing and _same_again(group, ranks):
        return "steps_repeated", "every step has the same samples: where does a step start?", got, due
    if repeated and missing and _overlap(ranks, repeated):
        return "overlap", "ranks have the same samples in a step: where does a rank's slice start, and end?", got, due
    if repeated and missing and any(len(set(mine)) < len(mine) for mine in held):
        sentence = "a rank has one sample twice while others never come: draw without putting back."
        return "drawn_again", sentence, got, due
    if repeated and missing:
        return "order_per_rank", f"some samples come twice and others never. {_ALIKE}", got, due
    if repeated:
        even = len({len(mine) for mine in held}) == 1
        cause, why = ("padding", _PADDED) if even else ("repeated", "each is to come once.")
        return cause, f"{_listed(repeated)} come{'s' * (len(repeated) == 1)} more than once: {why}", got, due
    if missing:
        even = len({len(mine) for mine in held}) == 1
        cause, why = ("tail_dropped", _DROPPED) if even else ("missing", "they would never be used.")
        return cause, f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} on no rank: {why}", got, due
    return None


def _same_again(group: Group, ranks: Sequence[Sequence[Step]]) -> bool:
    """Whether each rank has the same full batch in all of its steps."""
    batches = [[tuple(indices) for indices, _ in mine if len(indices) == group.batch_size] for mine in ranks]
    return all(len(mine) > 1 and len(set(mine)) == 1 for mine in batches)


def _overlap(ranks: Sequence[Sequence[Step]], repeated: Sequence[int]) -> bool:
    """Whether samples come twice within a step only, in several steps."""
    steps: dict[int, set[int]] = {}
    for mine in ranks:
        for step, (indices, _) in enumerate(mine):
            for index in indices:
                steps.setdefault(index, set()).add(step)
    at = [steps[index] for index in repeated]
    return all(len(each) == 1 for each in at) and len(set().union(*at)) > 1


DISAGREE = ("order_per_rank", "drawn_again", "overlap", "repeated", "missing")
NOT_FINITE = "a weight is nan or infinite: where there are no samples, 0 / 0 is no share."
_ALIKE = "Do all ranks shuffle alike, before they take their share?"
_PADDED = "ranks are filled up to equal numbers, as DistributedSampler does, and those samples count twice."
_DROPPED = "what does not fill a step is dropped; the last step may be a smaller one."


def steps(group: Group, ranks: Sequence[Sequence[Step]]) -> Told | None:
    """As many steps on every rank; all but the last are full, none exceeds a rank's batch_size."""
    lengths = [len(mine) for mine in ranks]
    if len(set(lengths)) > 1:
        few = lengths.index(min(lengths))
        sentence = (
            f"rank {few} has fewer steps than others: it is not there for their last all_reduce, and they wait for "
            "ever. A rank without samples takes the step with ([], 0.0)."
        )
        return "steps_differ", sentence, f"steps by rank: {lengths}", f"{group.num_steps} on every rank"
    totals = [sum(len(mine[step][0]) for mine in ranks) for step in range(lengths[0])]
    got = f"{len(totals)} steps of {_short(totals)} samples over all ranks"
    due = f"{group.num_steps} steps of {_short([group.total(step) for step in range(group.num_steps)])}"
    largest = max((len(indices) for mine in ranks for indices, _ in mine), default=0)
    if largest > group.batch_size:
        sentence = f"batch_size is the most that one rank takes in a step: {group.batch_size}."
        return "batch_too_large", sentence, f"{largest} samples on one rank", f"at most {group.batch_size}"
    if 0 in totals:
        return "extra_step", "in one of the steps no rank has a sample: leave it out.", got, due
    if len(totals) > group.num_steps and max(totals) <= group.batch_size < group.full:
        sentence = "batch_size is each rank's own: a full step holds world_size times as many."
        return "batch_size_is_global", sentence, got, due
    if any(total != group.total(step) for step, total in enumerate(totals)):
        sentence = "a step that is not the last is not full: some rank ran out before the others."
        return "not_full", sentence, got, due
    return None


def weights(by_group: Mapping[Group, Sequence[Sequence[Step]]]) -> tuple[Group, Told] | None:
    """A rank's weight in a step is its share of the step's samples. A known mistake must explain all groups at once.

    by_group: answers of all ranks, whose steps are right. Gives the first group with a wrong weight too.
    """
    found = [
        (group, len(indices), group.total(step), weight)
        for group, ranks in by_group.items()
        for mine in ranks
        for step, (indices, weight) in enumerate(mine)
    ]
    bad = next((each for each in found if not _close(each[3], each[1] / each[2])), None)
    if bad is None:
        return None
    group, count, total, weight = bad
    cause, sentence = "wrong_weight", "a weight is this rank's share of the samples of the step, over all ranks."
    for name, (made, why) in _weights().items():
        if all(_close(w, made(g, c, t)) for g, c, t, w in found):
            cause, sentence = name, why
            break
    got = f"weight {weight:.6g} for {count} of the {total} samples of a step"
    return group, (cause, sentence, got, f"{count / total:.6g}")


def _weights() -> dict:
    """What known mistakes make of (group, this rank's samples, all ranks' samples) of a step, and what to say."""
    return {
        "equal_weights": (
            lambda g, c, t: 1 / g.world_size,
            "1 / world_size is the weight of a full step only; the last differs.",
        ),
        "equal_among_present": (
            lambda g, c, t: 1 / g.world_size if c else 0.0,
            "1 / world_size is the weight of a full step only: in the last one the shares differ.",
        ),
        "share_of_a_full_step": (
            lambda g, c, t: c / g.full,
            "the last step is smaller: divide by the samples that it has, or its weights do not sum to 1.",
        ),
        "share_of_own_batch": (
            lambda g, c, t: c / g.batch_size,
            "this is how full the rank's own batch is; over all ranks the weights of a step sum to 1.",
        ),
        "weight_one": (lambda g, c, t: 1.0 if c else 0.0, "over all ranks the weights of a step sum to 1."),
        "all_ones": (lambda g, c, t: 1.0, "over all ranks the weights of a step sum to 1."),
        "weight_is_count": (lambda g, c, t: c, "this is the number of samples: divide by those of all ranks."),
        "times_world_size": (
            lambda g, c, t: c * g.world_size / t,
            "weights sum to 1 over ranks, not to world_size.",
        ),
        "share_of_epoch": (
            lambda g, c, t: c / g.num_samples,
            "the share is of the step's samples, not of the epoch's.",
        ),
    }


def orders_can_differ(group: Group) -> bool:
    """Whether there are so many ways to form the steps that two shuffles do not agree by chance."""
    return group.num_steps >= 2 and math.comb(group.num_samples, group.full) >= 10**6


def order(ranks: Sequence[Sequence[Step]]) -> tuple[tuple[int, ...], ...]:
    """Per step the samples that share it, over all ranks: what makes an order, for within a step none counts."""
    return tuple(tuple(sorted(i for mine in ranks for i in mine[step][0])) for step in range(len(ranks[0])))


def hardly_shuffled(drawn: Mapping[Group, Sequence[Sequence[int]]]) -> tuple[str, str, str] | None:
    """(sentence, got, expected) where neighbours, sample i and i + 1, share steps far more often than by chance.

    Summed over all groups, some hundred neighbours: half-way between chance, (full - 1) / (n - 1), and all of them is
    more than ten standard deviations off.
    """
    shared = pairs = 0
    by_chance = 0.0
    for group, order in drawn.items():
        step_of = {index: step for step, indices in enumerate(order) for index in indices}
        shared += sum(step_of[i] == step_of[i + 1] for i in range(group.num_samples - 1))
        pairs += group.num_samples - 1
        by_chance += sum(len(indices) * (len(indices) - 1) for indices in order) / group.num_samples
    if shared <= (by_chance + pairs) / 2:
        return None
    sentence = "samples that are stored side by side come in the same step: shuffle the samples, not whole blocks."
    got = f"{shared / pairs:.0%} of neighbours share a step"
    return sentence, got, f"about {by_chance / pairs:.0%}, as in a random order"


def unshuffled(group: Group) -> tuple[tuple[int, ...], ...]:
    """The same for samples as they are stored."""
    starts = range(0, group.num_samples, group.full)
    return tuple(tuple(range(start, min(start + group.full, group.num_samples))) for start in starts)


def words(steps: Sequence[Sequence[int]]) -> str:
    """The first step's samples, in words."""
    return f"the first step has samples {_short(list(steps[0]))}"


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def _listed(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"sample {numbers[0]}"
    return f"samples {_short(numbers)}"


def _short(numbers: list[int], most: int = 6) -> str:
    told = ", ".join(map(str, numbers[:most]))
    return f"{told}, ..." if len(numbers) > most else told or "none"
