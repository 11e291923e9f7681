"""What exercise 3.4 is asked: steps of a half-precision gradient on ranks, and what the rule makes of them.

A rank's gradient of the scaled loss is made in fp16, so that a value times the scale may overflow, as in training. Each
element's value stands in a row of WIDTH, so that gradients are far more bytes than a flag.
The rule is that of torch.amp.GradScaler (torch/amp/grad_scaler.py; Micikevicius et al., arXiv:1710.03740, section 3.2),
and the floor is DeepSpeed's min_loss_scale. Left out: the verdict (`scaler`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

LARGEST = 65504.0  # of fp16
SIZES = (5, 3)  # rows of the two parameters
WIDTH = 256
LR = 2.0**-7
HUGE = 2.0**20  # overflows fp16 at any scale that a training reaches


@dataclass(frozen=True)
class Case:
    """One training. inputs: per rank and step, the true gradient of each row; HUGE and nan are planted.

    touched: per rank and step, whether the second parameter takes part (False leaves its .grad None).
    """

    what: str
    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    inputs: tuple[tuple[tuple[float, ...], ...], ...]
    touched: tuple[tuple[bool, ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.inputs)

    @property
    def num_steps(self) -> int:
        return len(self.inputs[0])

    @property
    def settings(self) -> dict[str, float]:
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "min_scale": self.min_scale,
        }

    @property
    def tried(self) -> str:
        how = ", ".join(f"{name}={value:g}" for name, value in self.settings.items())
        return f"{self.world_size} ranks, {self.what}; {how}"


@dataclass(frozen=True)
class Step:
    """What is due after a step: on every rank the same. overflowed: ranks whose own gradients did."""

    stepped: bool
    scale: float
    overflowed: tuple[int, ...]


def overflows(case: Case, rank: int, step: int, scale: float) -> bool:
    """Whether a rank's scaled gradient is not finite in fp16. Values are chosen far from the limit's rounding."""
    values = case.inputs[rank][step]
    own = values if case.touched[rank][step] else values[: SIZES[0]]
    return any(not math.isfinite(value) or abs(value * scale) > LARGEST for value in own)


def due(case: Case) -> list[Step]:
    """The rule: where any rank overflows nobody steps, the scale falls and the count starts anew; else it counts."""
    scale, count, found = case.scale, 0, []
    for step in range(case.num_steps):
        bad = tuple(rank for rank in range(case.world_size) if overflows(case, rank, step, scale))
        if bad:
            scale, count = max(scale * case.backoff_factor, case.min_scale), 0
        else:
            count += 1
            if count == case.growth_interval:
                scale, count = scale * case.growth_factor, 0
        found.append(Step(not bad, scale, bad))
    return found


def cases(rng: random.Random) -> list[Case]:
    """Growth and a fall on one rank alone; a scale that starts too high; down to the floor; one rank."""
    grows = _case(rng, "an overflow on one rank", 3, 14, 2.0**10, 2.0, 0.5, 3, 1.0, planted={5: HUGE, 9: math.nan})
    high = _case(rng, "a scale that starts too high", 2, 16, 2.0**18, 2.0, 0.5, 3, 1.0)
    floor = _case(rng, "down to the floor", 4, 10, 64.0, 4.0, 0.25, 5, 2.0, planted=dict.fromkeys(range(1, 6), HUGE))
    alone = _case(rng, "alone", 1, 9, 2.0**12, 3.0, 0.5, 2, 1.0, planted={4: HUGE})
    return [grows, high, floor, alone]


def _case(
    rng: random.Random,
    what: str,
    world_size: int,
    steps: int,
    scale: float,
    growth: float,
    backoff: float,
    interval: int,
    least: float,
    planted: dict[int, float] | None = None,
) -> Case:
    """Values from 0.25 to 4 in steps of 1/64, so that fp16 holds them and their multiples by powers of 2."""
    inputs = [
        [[rng.choice((-1, 1)) * rng.randint(16, 256) / 64 for _ in range(sum(SIZES))] for _ in range(steps)]
        for _ in range(world_size)
    ]
    touched = [[rng.random() < 0.8 for _ in range(steps)] for _ in range(world_size)]
    for step, value in (planted or {}).items():
        rank = rng.randrange(world_size)
        touched[rank][step] = True
        inputs[rank][step][rng.randrange(sum(SIZES))] = value * rng.choice((-1, 1))
    return Case(
        what,
        scale,
        growth,
        backoff,
        interval,
        least,
        tuple(tuple(tuple(values) for values in of_rank) for of_rank in inputs),
        tuple(tuple(of_rank) for of_rank in touched),
    )


def parameters_due(case: Case, start: Sequence[float], rank: int) -> list[list[float]]:
    """A rank's parameters after each step: SGD on the true gradient where it stepped."""
    now, found = list(start), []
    for step, each in enumerate(due(case)):
        if each.stepped:
            count = sum(SIZES) if case.touched[rank][step] else SIZES[0]
            for at in range(count):
                now[at] -= LR * case.inputs[rank][step][at]
        found.append(list(now))
    return found
