"""What is wrong with the steps and scales that ranks went through in exercise 3.4, and why, in a sentence.

A known mistake is played through as the rule is; it must explain all trainings at once. Works on plain numbers, in the
parent. Left out: what is due (`scaler_cases`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.labs.lab03.scaler_cases import LR, SIZES, Case, due, overflows

Sequence_ = list[tuple[bool, float]]  # of one rank: per step, whether it stepped, and the scale afterwards
Runs = list[tuple[Case, list[Sequence_]]]


@dataclass(frozen=True)
class Rule:
    """How a scaler goes on: the right way, or with a mistake. sees: whether a rank finds an overflow, by own values."""

    sees: Callable[[Case, int, int, float], bool] = overflows
    everyone: bool = True  # asks the others
    steps_anyway: bool = False
    backs_off: bool = True
    backoff_each: bool = False  # once a rank that overflowed
    floor: bool = True
    resets: bool = True
    counts_skipped: bool = False
    interval: Callable[[Case], int] = lambda case: case.growth_interval
    keeps_count: bool = False  # after growth
    growth: Callable[[Case], float] = lambda case: case.growth_factor
    backoff: Callable[[Case], float] = lambda case: case.backoff_factor
    scale_alone: bool = False  # agrees on skipping, changes the scale by its own gradients


def play(case: Case, rule: Rule) -> list[Sequence_]:
    """What each rank goes through, all together: their scales may part."""
    ranks = range(case.world_size)
    scales, counts, found = [case.scale] * len(ranks), [0] * len(ranks), [[] for _ in ranks]
    for step in range(case.num_steps):
        bad = [rank for rank in ranks if rule.sees(case, rank, step, scales[rank])]
        for rank in ranks:
            overflow = bool(bad) if rule.everyone else rank in bad
            falls = rank in bad if rule.scale_alone else overflow
            if falls:
                scales[rank], counts[rank] = _lowered(case, rule, scales[rank], counts[rank], len(bad))
            elif not overflow:
                counts[rank] += 1
            if not falls and counts[rank] >= rule.interval(case):
                scales[rank] *= rule.growth(case)
                counts[rank] = counts[rank] if rule.keeps_count else 0
            found[rank].append((rule.steps_anyway or not overflow, scales[rank]))
    return found


def _lowered(case: Case, rule: Rule, scale: float, count: int, bad: int) -> tuple[float, int]:
    """(scale, count of good steps) after an overflow on so many ranks."""
    if rule.backs_off:
        scale *= rule.backoff(case) ** (bad if rule.backoff_each else 1)
        scale = max(scale, case.min_scale) if rule.floor else scale
    if rule.resets:
        return scale, 0
    return scale, count + 1 if rule.counts_skipped else count


def _plant(case: Case, rank: int, step: int, wanted: Callable[[float], bool], scale: float) -> bool:
    """Whether one of a rank's scaled gradients, in fp16, is as `wanted`."""
    values = case.inputs[rank][step]
    own = values if case.touched[rank][step] else values[: SIZES[0]]
    scaled = [math.inf if abs(v * scale) > 65504 else v * scale for v in own]
    return any(wanted(value) for value in scaled)


def _only_nan(case: Case, rank: int, step: int, scale: float) -> bool:
    return _plant(case, rank, step, math.isnan, scale)


def _only_inf(case: Case, rank: int, step: int, scale: float) -> bool:
    return _plant(case, rank, step, math.isinf, scale)


def _first_group(case: Case, rank: int, step: int, scale: float) -> bool:
    return any(not math.isfinite(v) or abs(v * scale) > 65504 for v in case.inputs[rank][step][: SIZES[0]])


def _never(case: Case, rank: int, step: int, scale: float) -> bool:
    return False


def _rules() -> Iterator[tuple[str, Rule, str]]:
    yield (
        "local",
        Rule(everyone=False),
        ("each rank looks at its own gradients only: one that overflows skips, the others step, and copies part."),
    )
    yield (
        "scale_differs",
        Rule(scale_alone=True),
        "all skip together, but only the rank that overflowed lowers its scale.",
    )
    yield "only_nan", Rule(sees=_only_nan), "an overflow in fp16 is infinity, not nan: look for what is not finite."
    yield "only_inf", Rule(sees=_only_inf), "nan is no infinity: look for what is not finite."
    yield "first_group", Rule(sees=_first_group), "only the first of the optimizer's parameter groups is looked at."
    yield (
        "never_skips",
        Rule(sees=_never),
        "an overflow is never found: the gradients must be looked at, on every step.",
    )
    yield (
        "steps_anyway",
        Rule(steps_anyway=True),
        "the scale falls, but the step is taken, with gradients that overflowed.",
    )
    yield from _of_the_scale()
    yield from _of_growth()


def _of_the_scale() -> Iterator[tuple[str, Rule, str]]:
    yield (
        "never_backs_off",
        Rule(backs_off=False),
        "after an overflow the scale must fall, or the next step overflows too.",
    )
    yield (
        "backs_off_per_rank",
        Rule(backoff_each=True),
        ("the scale falls once for every rank that overflowed: once a step is right."),
    )
    yield "no_floor", Rule(floor=False), "the scale falls below min_scale."
    yield "not_reset", Rule(resets=False), "an overflow starts the count of good steps anew; here the old one goes on."
    yield "not_reset", Rule(resets=False, counts_skipped=True), "skipped steps are counted as good ones."


def _of_growth() -> Iterator[tuple[str, Rule, str]]:
    yield (
        "grows_late",
        Rule(interval=lambda case: case.growth_interval + 1),
        ("the scale grows a step late: after growth_interval good steps, counting this one."),
    )
    yield "grows_early", Rule(interval=lambda case: case.growth_interval - 1 or 1), "the scale grows a step early."
    yield (
        "grows_always",
        Rule(interval=lambda case: 1),
        "the scale grows at every good step: growth_interval is ignored.",
    )
    yield (
        "never_grows",
        Rule(interval=lambda case: 10**9),
        ("the scale never grows: after growth_interval good steps in a row it must, for gradients become smaller."),
    )
    yield (
        "count_kept",
        Rule(keeps_count=True),
        "after growing, the count starts anew; here the scale grows at every step.",
    )
    yield (
        "fixed_factors",
        Rule(growth=lambda case: 2.0, backoff=lambda case: 0.5),
        ("the scale is doubled and halved, whatever growth_factor and backoff_factor say."),
    )
    yield (
        "factors_swapped",
        Rule(growth=lambda case: case.growth_factor, backoff=lambda case: 1 / case.growth_factor),
        ("the scale falls by 1 / growth_factor: backoff_factor says by how much."),
    )


def wrong_sequence(runs: Runs, case: Case, rank: int, step: int) -> tuple[str, str]:
    """(cause, sentence) for sequences of which that of `rank` is wrong first at `step` of `case`."""
    for cause, rule, sentence in _rules():
        if all(all(map(_same, ranks, play(each, rule))) for each, ranks in runs):
            return cause, sentence
    got = next(ranks for each, ranks in runs if each is case)
    if any(not _same(mine, got[0]) for mine in got):
        return "ranks_differ", "ranks do not go through the same steps and scales: they must decide together."
    overflow = [
        number for number in range(case.world_size) if overflows(case, number, step, _before(got[rank], step, case))
    ]
    if got[rank][step][0] and overflow:
        return "overflow_missed", f"rank {overflow[0]}'s gradients overflow in this step, and the step is taken."
    if not got[rank][step][0] and not overflow:
        return "skipped_for_nothing", "no gradient overflows in this step, and it is skipped."
    return "wrong_scale", "the step is right, the scale after it is not: when does it fall, when does it grow, by what?"


def _before(sequence: Sequence_, step: int, case: Case) -> float:
    return sequence[step - 1][1] if step else case.scale


def _same(one: Sequence_, other: Sequence_) -> bool:
    return all(a == b and math.isclose(x, y, rel_tol=1e-6) for (a, x), (b, y) in zip(one, other, strict=True))


def wrong_update(
    case: Case, record: Any, step: int, rank: int, before: Sequence[float], got: Sequence[float]
) -> tuple[str, str]:
    """(cause, sentence) where steps and scales are right and a rank's parameters are not."""
    if record is not None and record.sent_bytes / case.num_steps > 4096:
        return (
            "gradients_sent",
            "gradients are summed over ranks here: each rank's are its own, only the flag is shared.",
        )
    if not due(case)[step].stepped:
        return "steps_anyway", "parameters change in a step that is to be skipped, and that step() calls skipped."
    if not got or not all(map(math.isfinite, got)):
        return "not_finite", "parameters are not finite after a step without overflow."
    scale_before, scale_after = _scales(case, step)
    values = case.inputs[rank][step]
    ratios = [(b - g) / (LR * v) for b, g, v in zip(before, got, values, strict=True) if math.isfinite(v)]
    ratios = ratios[: SIZES[0]] if not case.touched[rank][step] else ratios

    def near(value: float) -> bool:
        return all(math.isclose(ratio, value, rel_tol=0.02) for ratio in ratios)

    if near(scale_before):
        return "not_unscaled", "the gradients are still multiplied by the scale when the optimizer steps: divide first."
    if scale_before != scale_after and near(scale_before / scale_after):
        return (
            "unscaled_late",
            "gradients are divided by the new scale; it was the old one that they were multiplied with.",
        )
    if near(1 / scale_before):
        return "unscaled_twice", "the gradients are divided by the scale twice."
    if near(0.0):
        return "no_step", "step() says that it stepped, and the parameters have not moved: call optimizer.step()."
    if math.isclose(ratios[0], 1.0, rel_tol=0.02) and math.isclose(ratios[-1], scale_before, rel_tol=0.02):
        return "first_group", "only the first of the optimizer's parameter groups is unscaled."
    return (
        "wrong_update",
        "steps and scales are right, the parameters are not: are gradients divided by the scale, once?",
    )


def _scales(case: Case, step: int) -> tuple[float, float]:
    """The scale before and after a step, by the rule."""
    found = due(case)
    return found[step - 1].scale if step else case.scale, found[step].scale
