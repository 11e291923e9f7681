"""What exercise 3.3 is asked: layers of different kinds and widths, and a budget that few choices fit.

A case is drawn until the simple strategies all miss the best choice, and until no choice lies a little over the budget:
what a record adds to the formula, the output and the loss, then decides nothing. Small slips in the formula (inputs
left out, a budget that must not be reached) pick another set in every other case.
Left out: the verdict (`checkpoints`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import labkit.labs.lab03.blocks as blocks
from labkit.labs.lab03.blocks import Block

TOKENS, HIDDEN, LAYERS = 96, 32, 6
INPUT = 4 * TOKENS * HIDDEN  # bytes
# Over the formula's bytes: the last output, the loss's weights and product, and one input that an answer copies.
ALLOWED = 4 * INPUT
GAP = 2 * INPUT  # above the budget there is no choice for so many bytes; inputs left out must be able to bridge it
Choice = tuple[bool, ...]


@dataclass(frozen=True)
class Case:
    """One call. seed: of the weights, the input and the loss. best: the choice with the least recomputation."""

    blocks: tuple[Block, ...]
    budget_bytes: int
    seed: int
    best: Choice

    @property
    def least_flops(self) -> int:
        return blocks.recomputed_flops(self.blocks, self.best)

    @property
    def costs(self) -> list[tuple[int, int, int]]:
        return [block.costs for block in self.blocks]

    @property
    def tried(self) -> str:
        widths = ", ".join(f"{block.kind} {block.ffn}" for block in self.blocks)
        return f"layers {widths}; budget_bytes={self.budget_bytes:,}"


def cases(rng: random.Random, count: int = 4) -> list[Case]:
    """In half of them the last layer is the largest, so that the order decides, and every strategy misses.

    Over all of them no two strategies choose alike, so that a wrong answer is told its own; nor does a slip.
    In one of them neighbours do not fit under one checkpoint together.
    """
    for _ in range(100):
        drawn = [_case(rng, large_last=number % 2 == 0) for number in range(count)]
        ways = [*strategies(), *slips()]
        made = [tuple(fn(case.blocks, case.budget_bytes) for case in drawn) for _, fn, _ in ways]
        apart = len({*made, tuple(case.best for case in drawn)}) == len(made) + 1
        if apart and any(joined_bytes(case) > case.budget_bytes + 2 * ALLOWED for case in drawn):
            break
    return drawn


def _case(rng: random.Random, large_last: bool) -> Case:
    case = None
    for _ in range(2000):
        widths = rng.sample(range(40, 300), LAYERS)
        made = [Block(rng.choice(blocks.KINDS), TOKENS, HIDDEN, width) for width in widths]
        made = tuple(sorted(made, key=lambda block: block.kept_bytes * (1 if large_last else rng.random())))
        budget = _budget(rng, made)
        if budget is None:
            continue
        best = blocks.best(made, budget)
        case = Case(made, budget, rng.getrandbits(40), best)
        missed = [fn(made, budget) != best for _, fn, _ in strategies()]
        slip = _strict if large_last else _without_inputs
        if sum(missed) >= len(missed) - (not large_last) and slip(made, budget) != best:
            return case
    return case


def joined_bytes(case: Case) -> int:
    """Peak of the best choice where layers that follow each other share a checkpoint: they all come back at once."""
    held = most = 0
    groups = itertools.groupby(zip(case.blocks, case.best, strict=True), key=lambda each: each[1])
    for again, group in groups:
        kept = [block.kept_bytes for block, _ in group]
        most = max(most, held + sum(kept))
        held += INPUT if again else sum(kept)
    return most


def _budget(rng: random.Random, made: tuple[Block, ...]) -> int | None:
    """The peak of some choice, from the middle half of all, with no choice a little above it."""
    ways = blocks.ways(made)
    if len({way.flops for way in ways}) < len(ways):
        return None  # FLOPs would not tell which layers were recomputed
    peaks = sorted({way.peak_bytes for way in ways})
    wide = [at for at in range(len(peaks) // 4, 3 * len(peaks) // 4) if peaks[at + 1] - peaks[at] > GAP]
    if not wide:
        return None
    budget = peaks[rng.choice(wide)]
    return budget if 2 <= sum(blocks.best(made, budget)) <= len(made) - 2 else None


def strategies() -> Iterator[tuple[str, Callable[[tuple[Block, ...], int], Choice | None], str]]:
    """(cause, a simple way to choose, what to say of it): none of them is right in general."""
    yield (
        "not_checkpointed",
        lambda made, budget: (False,) * len(made),
        ("no layer is run under checkpoint: what was chosen has to be done as well."),
    )
    yield (
        "all_checkpointed",
        lambda made, budget: (True,) * len(made),
        ("every layer is recomputed: some of them would fit, and need not be."),
    )
    yield (
        "every_other",
        lambda made, budget: tuple(at % 2 == 0 for at in range(len(made))),
        ("every other layer is checkpointed, whatever it keeps and whatever it costs."),
    )
    yield (
        "every_other",
        lambda made, budget: tuple(at % 2 == 1 for at in range(len(made))),
        ("every other layer is checkpointed, whatever it keeps and whatever it costs."),
    )
    yield (
        "from_the_front",
        _greedy(lambda block, at: at),
        "layers are checkpointed from the first one on, until they fit.",
    )
    yield (
        "from_the_back",
        _greedy(lambda block, at: -at),
        "layers are checkpointed from the last one on, until they fit.",
    )
    yield from _by_costs()


def _by_costs() -> Iterator[tuple[str, Callable[[tuple[Block, ...], int], Choice | None], str]]:
    yield (
        "largest_first",
        _greedy(lambda block, at: -block.kept_bytes),
        ("the largest layers are checkpointed first: they may also be those that cost most to recompute."),
    )
    yield (
        "cheapest_first",
        _greedy(lambda block, at: block.forward_flops),
        ("the cheapest layers are checkpointed first: they may also free least, so that more of them are needed."),
    )
    yield (
        "best_ratio_first",
        _greedy(lambda block, at: -(block.kept_bytes - block.input_bytes) / block.forward_flops),
        ("most bytes per FLOP first is a good guess, but layers are whole: a smaller set of others fits too."),
    )
    yield "fewest", _fewest, ("the fewest layers are checkpointed; fewer FLOPs is what counts.")
    yield (
        "end_of_forward",
        _at_the_end,
        (
            "what is held at the end of forward fits, but the peak comes in backward: there a checkpointed layer has "
            "all of its bytes again, beside what the layers before it hold."
        ),
    )
    yield (
        "too_careful",
        _too_careful,
        ("this leaves room for the largest recomputation on top of everything: by then later layers are gone."),
    )


def slips() -> Iterator[tuple[str, Callable[[tuple[Block, ...], int], Choice | None], str]]:
    """As `strategies`: the right way, but for one slip in the formula, which shows in some of the cases only."""
    yield (
        "inputs_forgotten",
        _without_inputs,
        (
            "a checkpointed layer still keeps its input, input_bytes; counted as nothing, too much seems to fit beside "
            "the layers behind it."
        ),
    )
    yield (
        "budget_not_used_up",
        _strict,
        "at most budget_bytes may be held: a choice that needs exactly so many fits too, `<=` and not `<`.",
    )


def _without_inputs(made: tuple[Block, ...], budget: int) -> Choice | None:
    def peak(chosen: Choice) -> int:
        held = most = 0
        for block, again in zip(made, chosen, strict=True):
            most = max(most, held + block.kept_bytes)
            held += 0 if again else block.kept_bytes
        return most

    fit = [way for way in blocks.ways(made) if peak(way.chosen) <= budget]
    return min(fit, key=lambda way: way.flops).chosen if fit else None


def _strict(made: tuple[Block, ...], budget: int) -> Choice | None:
    return blocks.best(made, budget - 1)


def _greedy(key: Callable[[Block, int], float]) -> Callable[[tuple[Block, ...], int], Choice | None]:
    def choose(made: tuple[Block, ...], budget: int) -> Choice | None:
        chosen = [False] * len(made)
        for at in sorted(range(len(made)), key=lambda at: key(made[at], at)):
            if blocks.peak_bytes(made, chosen) <= budget:
                break
            chosen[at] = True
        return tuple(chosen)

    return choose


def _fewest(made: tuple[Block, ...], budget: int) -> Choice | None:
    fit = [way for way in blocks.ways(made) if way.peak_bytes <= budget]
    return min(fit, key=lambda way: sum(way.chosen)).chosen


def _at_the_end(made: tuple[Block, ...], budget: int) -> Choice | None:
    fit = [way for way in blocks.ways(made) if way.end_bytes <= budget]
    return min(fit, key=lambda way: way.flops).chosen if fit else None


def _too_careful(made: tuple[Block, ...], budget: int) -> Choice | None:
    def peak(way: blocks.Way) -> int:
        again = [b.kept_bytes - b.input_bytes for b, chosen in zip(made, way.chosen, strict=True) if chosen]
        return way.end_bytes + max(again, default=0)

    fit = [way for way in blocks.ways(made) if peak(way) <= budget]
    return min(fit, key=lambda way: way.flops).chosen if fit else None
