"""Judge of exercise 1.2, `bus_bandwidth`: bytes per second of a wire, as nccl-tests defines it.

busbw = S / time * factor, S the full size: all_reduce 2(n-1)/n; all_gather, reduce_scatter, all_to_all (n-1)/n;
broadcast, reduce 1 (nccl-tests, doc/PERFORMANCE.md). The function is arithmetic, so it is asked many questions at
once, and a wrong answer is recognised by what known mistakes would return.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from labkit.check import evidence
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest

NAME = "bus_bandwidth"
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
Question = tuple[str, int, int, float]  # op, num_bytes, world_size, time_s
NUM_RANKS = 3
RTOL = 1e-9
# The example of the exercise's text comes first.
EXAMPLE: Question = ("all_reduce", 1_000_000, 4, 0.001)


def judge(fn: Callable, seed: int) -> Verdict:
    """Every collective, groups of 2 to 512 ranks, sizes from bytes to gigabytes; asked on three ranks."""
    rng = random.Random(seed)
    questions = [EXAMPLE]
    for op in OPS:
        for world_size in (2, 4, rng.randint(5, 16), rng.choice((64, 512))):
            questions.append((op, rng.randint(10**3, 10**9), world_size, rng.uniform(1e-5, 2.0)))
    questions[1:] = rng.sample(questions[1:], len(questions) - 1)
    seen = evidence.observe(_answers, NUM_RANKS, args=(fn, questions))
    tried = f"on {NUM_RANKS} ranks"
    failed = evidence.ran(seen, NAME, tried)
    if failed is not None:
        return failed
    for answers in seen.results:
        found = _wrong_type(questions, answers) or _wrong_value(questions, answers)
        if found is not None:
            return found
    found = evidence.no_communication(seen, tried) or honest(seen, tried)
    return found or right("bytes per second of a wire, for six collectives and groups of 2 to 512 ranks")


def _answers(fn: Callable, questions: list[Question]) -> list:
    """Runs in a rank. A stub is told apart from wrong answers."""
    answers = [fn(*question) for question in questions]
    return NotImplemented if any(answer is NotImplemented for answer in answers) else answers


def _call(question: Question) -> str:
    op, num_bytes, world_size, time_s = question
    return f"bus_bandwidth({op!r}, {num_bytes}, {world_size}, {time_s:.6g})"


def _wrong_type(questions: list[Question], answers: list) -> Verdict | None:
    for question, answer in zip(questions, answers, strict=True):
        if answer is None:
            sentence = f"there is no answer for {question[0]}; six collectives are asked for."
            return wrong("shape", "op_missing", sentence, _call(question), answer, "a number")
        if type(answer) not in (int, float):
            sentence = "the answer is one number: bytes per second."
            return wrong("shape", "not_a_number", sentence, _call(question), answer, "a number")
    return None


def _factor(op: str, n: int) -> float:
    if op in ("broadcast", "reduce"):
        return 1.0
    return (2 if op == "all_reduce" else 1) * (n - 1) / n


def _due(question: Question) -> float:
    op, num_bytes, world_size, time_s = question
    return num_bytes / time_s * _factor(op, world_size)


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=RTOL)


def _wrong_value(questions: list[Question], answers: list) -> Verdict | None:
    for question, answer in zip(questions, answers, strict=True):
        if not _same(answer, _due(question)):
            cause, sentence = _known_mistake(questions, answers) or _one_op(questions, answers)
            return wrong("values", cause, sentence, _call(question), f"{answer:.6g}", f"{_due(question):.6g} bytes/s")
    return None


def _mistake(name: str, question: Question) -> float:
    """What a known mistake returns."""
    op, num_bytes, n, time_s = question
    algbw, due = num_bytes / time_s, _due(question)
    return {
        "algbw": algbw,
        "all_like_all_reduce": algbw * 2 * (n - 1) / n,
        "all_alike": algbw * (n - 1) / n,
        "one_way_all_reduce": algbw * (n - 1) / n if op == "all_reduce" else due,
        "rooted_scaled": algbw * (n - 1) / n if op in ("broadcast", "reduce") else due,
        "per_rank_size": due * n if op in ("all_gather", "reduce_scatter", "all_to_all") else due,
        "total_traffic": due * n,
        "factor_upside_down": algbw / _factor(op, n),
        "in_gigabytes": due / 1e9,
        "in_gibibytes": due / 2**30,
        "in_bits": due * 8,
        "time_upside_down": 1 / due,
        "size_forgotten": _factor(op, n) / time_s,
        "ignores_arguments": algbw * _factor(op, NUM_RANKS),
        "messages_not_bytes": algbw * (1.0 if op in ("broadcast", "reduce") else _factor(op, n) * n),
        "whole_division": num_bytes // time_s * _factor(op, n),
    }[name]


_SENTENCES = {
    "algbw": "this is algbw, S over time, for every collective: no factor says what travelled on a wire.",
    "all_like_all_reduce": "every collective was counted like an all_reduce; others go round the ring once, or not.",
    "all_alike": "every collective got (n-1)/n; all_reduce goes round twice, broadcast sends S on each wire.",
    "one_way_all_reduce": "an all_reduce is a reduce_scatter and an all_gather: it goes round the ring twice.",
    "rooted_scaled": "broadcast and reduce send all of S over each wire of the chain: their factor is 1.",
    "per_rank_size": "num_bytes is S already, the full size, not one rank's part of it.",
    "total_traffic": "this adds up all wires; busbw is the speed of one.",
    "factor_upside_down": "the factor is upside down: a wire carries 2(n-1)/n S in an all_reduce.",
    "in_gigabytes": "this is in GB/s; bytes per second are asked for.",
    "in_gibibytes": "this is in GiB/s; bytes per second are asked for.",
    "in_bits": "this is in bits per second; bytes are asked for.",
    "time_upside_down": "this is seconds per byte: divide by the time.",
    "size_forgotten": "num_bytes does not show in the answer.",
    "ignores_arguments": "the factor follows the group it runs in, not the world_size it was given.",
    "messages_not_bytes": "n-1 steps move n-1 chunks, and a chunk is S/n: divide by n.",
    "whole_division": "`//` rounds down: the result is no longer exact.",
}


def _known_mistake(questions: list[Question], answers: list) -> tuple[str, str] | None:
    pairs = list(zip(questions, answers, strict=True))
    if len(set(answers)) == 1:
        return "hard_coded", "the same number comes back whatever is asked: the example's answer by heart."
    for cause, sentence in _SENTENCES.items():
        if all(_same(answer, _mistake(cause, question)) for question, answer in pairs):
            return cause, sentence
    return None


def _one_op(questions: list[Question], answers: list) -> tuple[str, str]:
    """Which collectives are wrong, when no single mistake explains everything."""
    pairs = list(zip(questions, answers, strict=True))
    bad = [op for op in OPS if not all(_same(answer, _due(q)) for q, answer in pairs if q[0] == op)]
    return "wrong_factor", f"the factor of {', '.join(bad)} is another one."
