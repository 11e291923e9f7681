"""Judge of exercise 1.3, `fit_alpha_beta`: time = alpha + beta * size, from measurements of which some are spoilt.

Data are made from a known line, with 2% of noise and up to two measurements of five per size delayed 3 to 30 times, as
when a rank lost its core. The line found is compared with the true one at every size, in percent: alpha decides at
1 KiB, beta at 64 MiB. Wrong answers are recognised by what known mistakes make of the same data. Left out:
a noise that is not independent, and sizes where the backend changes its algorithm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest

NAME = "fit_alpha_beta"
WITHIN = 0.2  # of the true line, at every size
NOISE, REPETITIONS, DELAYED = 0.02, 5, 2
SIZES = tuple(2**power for power in range(10, 27, 2))  # 1 KiB to 64 MiB


@dataclass(frozen=True)
class Case:
    """One call: measurements, and the line behind them. what: in words, for the card."""

    what: str
    alpha_s: float
    beta_s: float
    sizes: tuple[int, ...]
    times: tuple[float, ...]

    @property
    def tried(self) -> str:
        return f"{len(self.sizes)} measurements, {self.what}"

    def off(self, alpha_s: float, beta_s: float) -> tuple[float, int]:
        """(largest deviation from the true line, as a share of it; the size where it is)."""
        true = {size: self.alpha_s + self.beta_s * size for size in self.sizes}
        return max((abs((alpha_s + beta_s * size) / due - 1), size) for size, due in true.items())


def judge(fn: Callable, seed: int) -> Verdict:
    """A clean line first, then noise, delays, delays at both ends, measurements out of order."""
    cases = _cases(random.Random(seed))
    seen = evidence.observe(_answers, 2, args=(fn, [(list(c.sizes), list(c.times)) for c in cases]))
    failed = evidence.ran(seen, NAME, cases[0].tried)
    if failed is not None:
        return failed
    for answers in seen.results:
        for case, answer in zip(cases, answers, strict=True):
            found = _wrong_type(case, answer)
            if found is not None:
                return found
        for case, answer in zip(cases, answers, strict=True):
            found = _wrong_line(cases, answers, case, answer)
            if found is not None:
                return found
    found = evidence.no_communication(seen, "on 2 ranks") or honest(seen, "on 2 ranks")
    worst = max(case.off(*map(float, answer))[0] for case, answer in zip(cases, seen.results[0], strict=True))
    return found or right(f"within {worst:.1%} of the true line at every size, with {DELAYED} of 5 delayed")


def _cases(rng: random.Random) -> list[Case]:
    clean = _case(rng, "no noise", 0, noise=0.0)
    noisy = _case(rng, "2% of noise", 0)
    # A fast start and a slow wire: noise at 64 MiB is then many times alpha.
    fast, slow = rng.uniform(1e-5, 2e-5), rng.uniform(1e-9, 2e-9)
    steep = _case(rng, "2% of noise, a small alpha", 0, alpha_s=fast, beta_s=slow)
    delayed = _case(rng, "some delayed", DELAYED)
    ends = _case(rng, "the first and the last delayed", DELAYED, first_and_last=True)
    mixed = _case(rng, "some delayed, in no order", DELAYED)
    order = list(range(len(mixed.sizes)))
    while mixed.sizes[order[0]] == mixed.sizes[order[-1]] or order == sorted(order):
        rng.shuffle(order)
    shuffled = (tuple(mixed.sizes[i] for i in order), tuple(mixed.times[i] for i in order))
    return [clean, noisy, steep, delayed, ends, Case(mixed.what, mixed.alpha_s, mixed.beta_s, *shuffled)]


def _case(
    rng: random.Random,
    what: str,
    delayed: int,
    noise: float = NOISE,
    alpha_s: float = 0.0,
    beta_s: float = 0.0,
    first_and_last: bool = False,
) -> Case:
    alpha_s = alpha_s or 10 ** rng.uniform(-4.7, -3.3)
    beta_s = beta_s or 10 ** rng.uniform(-9.7, -8.7)
    sizes, times = [], []
    for size in SIZES:
        late = set(rng.sample(range(REPETITIONS), delayed))
        if first_and_last:
            late = {0} if size == SIZES[0] else {REPETITIONS - 1} if size == SIZES[-1] else late
        for repetition in range(REPETITIONS):
            time_s = (alpha_s + beta_s * size) * (1 + noise * rng.gauss(0, 1))
            sizes.append(size)
            times.append(time_s * (rng.uniform(3, 30) if repetition in late else 1))
    return Case(what, alpha_s, beta_s, tuple(sizes), tuple(times))


def _answers(fn: Callable, questions: list) -> Any:
    """Runs in a rank. A stub is told apart from wrong answers; numpy's numbers are numbers too."""
    answers = [fn(*question) for question in questions]
    if any(answer is NotImplemented for answer in answers):
        return NotImplemented
    return [_plain(answer) for answer in answers]


def _plain(answer: Any) -> Any:
    import numpy as np

    if type(answer) in (tuple, list, np.ndarray):
        return [float(each) if isinstance(each, (int, float, np.floating)) else each for each in answer]
    return answer


def _wrong_type(case: Case, answer: Any) -> Verdict | None:
    if type(answer) is list and len(answer) == 2 and all(type(each) is float for each in answer):
        if all(math.isfinite(each) for each in answer):
            return None
        sentence = "alpha and beta are finite numbers."
        return wrong("shape", "not_finite", sentence, case.tried, answer, "two finite numbers")
    sentence = "the answer is two numbers: alpha in seconds, and beta in seconds per byte."
    return wrong("shape", "not_two_numbers", sentence, case.tried, kind(answer), "(alpha_s, beta_s)")


def _wrong_line(cases: list[Case], answers: list, case: Case, answer: list[float]) -> Verdict | None:
    off, size = case.off(*answer)
    if off <= WITHIN:
        return None
    cause, sentence = _known_mistake(cases, answers) or _by_its_line(case, answer)
    due = case.alpha_s + case.beta_s * size
    got = f"alpha {answer[0]:.3g} s, beta {answer[1]:.3g} s/byte: {answer[0] + answer[1] * size:.3g} s at {size} bytes"
    expected = f"alpha {case.alpha_s:.3g} s, beta {case.beta_s:.3g} s/byte: {due:.3g} s, within {WITHIN:.0%}"
    return wrong("values", cause, sentence, case.tried, got, expected)


def line_through(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Ordinary least squares."""
    mean_size, mean_time = sum(sizes) / len(sizes), sum(times) / len(times)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    slope = sum((s - mean_size) * (t - mean_time) for s, t in zip(sizes, times, strict=True)) / spread
    return mean_time - slope * mean_size, slope


def _middles(case: Case) -> tuple[list[int], list[float]]:
    """Every size once, with the median of its times."""
    sizes = sorted(set(case.sizes))
    return sizes, [median(t for s, t in zip(case.sizes, case.times, strict=True) if s == size) for size in sizes]


def _mistake(name: str, case: Case) -> tuple[float, float]:
    """What a known mistake makes of the same measurements."""
    first, last = (case.sizes[0], case.times[0]), (case.sizes[-1], case.times[-1])
    slope = (last[1] - first[1]) / (last[0] - first[0]) if last[0] != first[0] else 0.0
    logs = line_through([math.log(s) for s in case.sizes], [math.log(t) for t in case.times])
    return {
        "outliers": line_through(case.sizes, case.times),
        "alpha_drowned": line_through(*_middles(case)),
        "two_points": (first[1] - slope * first[0], slope),
        "ends_by_hand": (first[1], last[1] / last[0]),
        "power_law": (math.exp(logs[0]), logs[1]),
    }[name]


_SENTENCES = {
    "outliers": "least squares bends to every delayed measurement: their squares weigh more than all the others.",
    "alpha_drowned": "the medians are sound, but least squares counts seconds: 2% at 64 MiB outweighs all of alpha.",
    "two_points": "the line goes through the first and the last measurement, and either may be a delayed one.",
    "ends_by_hand": "alpha and beta were read off one measurement each, and either may be a delayed one.",
    "power_law": "this is a straight line in the logarithms, a power law; alpha + beta * size is curved there.",
}


def _known_mistake(cases: list[Case], answers: list) -> tuple[str, str] | None:
    for cause, sentence in _SENTENCES.items():
        mistakes = [_mistake(cause, case) for case in cases]
        if all(_near(answer, mistake) for answer, mistake in zip(answers, mistakes, strict=True)):
            return cause, sentence
    return None


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-15) for a, b in zip(one, other, strict=True))


def _by_its_line(case: Case, answer: list[float]) -> tuple[str, str]:
    alpha_s, beta_s = answer
    if case.off(beta_s, alpha_s)[0] <= WITHIN:
        return "swapped", "alpha and beta are the wrong way round: alpha comes first."
    if beta_s and case.off(alpha_s, 1 / beta_s)[0] <= WITHIN:
        return "bandwidth", "beta is seconds per byte; this is bytes per second."
    for unit in (1e3, 1e6, 1e9):
        if case.off(alpha_s / unit, beta_s / unit)[0] <= WITHIN:
            return "wrong_unit", "seconds and seconds per byte are asked for; these are in another unit."
    smallest = min(case.sizes)
    if abs((alpha_s + beta_s * smallest) / (case.alpha_s + case.beta_s * smallest) - 1) <= WITHIN:
        return (
            "beta_off",
            "alpha is sound and beta is not: what do the largest sizes say, without the delayed ones?",
        )
    if abs(beta_s / case.beta_s - 1) <= WITHIN:
        if alpha_s == 0:
            return (
                "no_alpha",
                "beta is sound, but the line goes through 0: a message of no bytes takes alpha.",
            )
        return (
            "alpha_off",
            "beta is sound and alpha is not: what do the smallest sizes say, counted in percent?",
        )
    return (
        "wrong_line",
        "neither end of the line is where the measurements are, once the delayed ones are left out.",
    )
