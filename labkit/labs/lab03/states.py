"""Judge of exercise 3.1, `model_state_bytes`: parameters, gradients and optimizer state, by ZeRO's convention.

In fp32 all is 4 bytes wide. In bf16 or fp16, mixed precision as ZeRO counts it (arXiv:1910.02054, section 3.1):
parameters and gradients in 2 bytes; a master copy in fp32 and the optimizer's own numbers, in fp32 too, count as
optimizer state. The function is arithmetic, so it is asked many questions at once, and a wrong answer is recognised by
what known mistakes would return. Left out: step counters and the scales of 8-bit states, a few bytes a tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import labkit.labs.lab00.attempts as attempts
import labkit.labs.lab03.own_work as own_work
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest

NAME = "model_state_bytes"
ARGUMENTS = "num_parameters, precision, optimizer"
PRECISIONS = ("fp32", "bf16", "fp16")
# Bytes per parameter of what the optimizer keeps beside a master copy.
OPTIMIZERS = {"sgd": 0, "momentum": 4, "lion": 4, "adam": 8, "adamw": 8, "adamw8bit": 2}
NUM_RANKS = 2
Question = tuple[int, str, str]  # num_parameters, precision, optimizer
Parts = tuple[float, float, float]


def judge(fn: Callable, seed: int) -> Verdict:
    """Every precision with every optimizer, from one parameter to a trillion; asked on two ranks."""
    rng = random.Random(seed)
    questions = [(10**9, "bf16", "adamw"), (1, "fp32", "adamw")]
    for precision in PRECISIONS:
        for optimizer in OPTIMIZERS:
            questions.append((rng.randint(10**6, 10**12), precision, optimizer))
    questions[1:] = rng.sample(questions[1:], len(questions) - 1)
    tried = f"on {NUM_RANKS} ranks"
    seen = evidence.observe(_answers, NUM_RANKS, args=(fn, questions))
    failed = attempts.ran(seen, NAME, tried)
    if failed is not None:
        return failed
    for answers, borrowed in seen.results:
        found = _wrong_type(questions, answers) or _wrong_value(questions, answers)
        found = found or (own_work.verdict(borrowed, tried) if borrowed else None)
        if found is not None:
            return found
    found = evidence.no_communication(seen, tried) or honest(seen, tried)
    return found or right(
        f"{len(PRECISIONS)} precisions, {len(OPTIMIZERS)} optimizers; a billion parameters in bf16 under AdamW are "
        f"{sum(due(questions[0])) / 1e9:g} GB of states"
    )


def _answers(fn: Callable, questions: Sequence[Question]) -> Any:
    """Runs in a rank: (answers, what it borrowed). A stub is told apart; numpy's numbers are numbers too."""
    answers = []
    for question in questions:
        answer = attempts.called(fn, ARGUMENTS, *question)
        if attempts.no_result(answer):
            return answer
        answers.append(_plain(answer))
    return answers, own_work.borrowed(fn)


def _plain(answer: Any) -> Any:
    import numbers

    def number(each: Any) -> Any:
        if isinstance(each, numbers.Integral):
            return int(each)
        return float(each) if isinstance(each, numbers.Real) else kind(each)

    if type(answer) in (tuple, list):
        return [number(each) for each in answer]
    return None if answer is None else number(answer)


def call(question: Question) -> str:
    """A question as a learner would write it."""
    return f"model_state_bytes({question[0]}, {question[1]!r}, {question[2]!r})"


def due(question: Question) -> tuple[int, int, int]:
    """Bytes of (parameters, gradients, optimizer state with the master copy)."""
    count, precision, optimizer = question
    wide = precision == "fp32"
    each = 4 if wide else 2
    return count * each, count * each, count * ((0 if wide else 4) + OPTIMIZERS[optimizer])


def _wrong_type(questions: Sequence[Question], answers: list) -> Verdict | None:
    for question, answer in zip(questions, answers, strict=True):
        expected = "(parameters, gradients, optimizer), in bytes"
        if answer is None:
            sentence = f"nothing came back for {question[1]} and {question[2]}."
            return wrong("shape", "returns_nothing", sentence, call(question), "None", expected)
        if type(answer) in (int, float):
            sentence = "three numbers are asked for, in this order: parameters, gradients, optimizer."
            return wrong("shape", "total_only", sentence, call(question), answer, expected)
        if type(answer) is not list or len(answer) != 3 or any(type(each) not in (int, float) for each in answer):
            sentence = "the answer is three numbers: bytes of parameters, of gradients, of the optimizer's state."
            return wrong("shape", "not_three_numbers", sentence, call(question), answer, expected)
    return None


def _wrong_value(questions: Sequence[Question], answers: list) -> Verdict | None:
    for question, answer in zip(questions, answers, strict=True):
        if not _same(answer, due(question)):
            cause, sentence = _known_mistake(questions, answers) or _one_kind(questions, answers)
            got, expected = f"({', '.join(f'{each:.10g}' for each in answer)})", str(due(question))
            return wrong("values", cause, sentence, call(question), got, expected)
    return None


def _same(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= 1e-9 * abs(b) for a, b in zip(one, other, strict=True))


def _known_mistake(questions: Sequence[Question], answers: list) -> tuple[str, str] | None:
    if len({tuple(answer) for answer in answers}) == 1:
        return "hard_coded", "the same bytes come back whatever is asked."
    for cause, made, sentence in _mistakes():
        if all(_same(answer, made(*question)) for question, answer in zip(questions, answers, strict=True)):
            return cause, sentence
    return None


def _mistakes() -> Iterator[tuple[str, Callable[[int, str, str], Parts], str]]:
    """(cause, what a known mistake makes of a question, what to say)."""

    def parts(p: int, precision: str, optimizer: str) -> tuple[int, int, int, int]:
        """Bytes of parameters, gradients, master copy and the optimizer's own numbers."""
        wide = precision == "fp32"
        each = 4 if wide else 2
        return p * each, p * each, 0 if wide else 4 * p, p * OPTIMIZERS[optimizer]

    def from_parts(make: Callable[..., Parts]) -> Callable[[int, str, str], Parts]:
        return lambda *question: make(*parts(*question))

    yield (
        "no_master",
        from_parts(lambda w, g, m, s: (w, g, s)),
        ("in 16 bits the optimizer also keeps a master copy of the parameters in fp32: small steps would be lost."),
    )
    yield (
        "master_elsewhere",
        from_parts(lambda w, g, m, s: (w + m, g, s)),
        ("the sum is right, but ZeRO counts the master copy as optimizer state: it is sharded with it."),
    )
    yield (
        "master_in_fp32",
        lambda p, d, o: (*due((p, d, o))[:2], p * (4 + OPTIMIZERS[o])),
        ("in fp32 the parameters are their own master copy: there is no second one."),
    )
    yield (
        "gradients_in_fp32",
        lambda p, d, o: (due((p, d, o))[0], 4 * p, due((p, d, o))[2]),
        ("gradients in fp32 are Megatron's convention (2 + 4 + 12); ZeRO's keeps them in the precision of backward."),
    )
    yield (
        "gradient_copy",
        from_parts(lambda w, g, m, s: (w, g + m, m + s)),
        ("a copy of the gradients in fp32 is what DeepSpeed's estimators add; ZeRO's 16 bytes are without it."),
    )
    yield from _of_the_optimizer()
    yield from _of_units()


def _of_the_optimizer() -> Iterator[tuple[str, Callable[[int, str, str], Parts], str]]:
    yield (
        "states_in_16_bits",
        lambda p, d, o: _narrow(p, d, o),
        ("the optimizer's numbers are in fp32 also when parameters are in 16 bits."),
    )
    yield (
        "always_adam",
        lambda p, d, o: due((p, d, "adamw")),
        ("every optimizer gets Adam's two moments; plain SGD keeps nothing, momentum and Lion one number."),
    )
    yield (
        "one_moment",
        lambda p, d, o: due((p, d, "momentum" if o in ("adam", "adamw") else o)),
        ("Adam keeps two numbers for each parameter: a mean of gradients, and one of their squares."),
    )
    yield "like_fp32", lambda p, d, o: due((p, "fp32", o)), "precision does not show: all is counted in 4 bytes."
    yield (
        "like_bf16",
        lambda p, d, o: due((p, "bf16", o)),
        "precision does not show: fp32 is counted as if it were bf16.",
    )
    yield (
        "eight_bits_ignored",
        lambda p, d, o: due((p, d, "adamw" if o == "adamw8bit" else o)),
        ("an 8-bit optimizer keeps each of its two moments in one byte."),
    )


def _of_units() -> Iterator[tuple[str, Callable[[int, str, str], Parts], str]]:
    yield "per_parameter", lambda p, d, o: due((1, d, o)), "these are bytes of one parameter: how many are there?"
    yield "in_gigabytes", lambda p, d, o: tuple(each / 1e9 for each in due((p, d, o))), "bytes are asked for, not GB."
    yield (
        "in_gibibytes",
        lambda p, d, o: tuple(each / 2**30 for each in due((p, d, o))),
        "bytes are asked for, not GiB.",
    )
    yield "in_bits", lambda p, d, o: tuple(8 * each for each in due((p, d, o))), "these are bits: a byte has eight."
    yield (
        "another_order",
        lambda p, d, o: tuple(due((p, d, o))[i] for i in (0, 2, 1)),
        ("the order is parameters, gradients, optimizer."),
    )


def _narrow(p: int, precision: str, optimizer: str) -> Parts:
    """Moments in the width of the parameters."""
    w, g, s = due((p, precision, optimizer))
    own = p * OPTIMIZERS[optimizer]
    return w, g, s - own + (own if precision == "fp32" or optimizer == "adamw8bit" else own // 2)


def _one_kind(questions: Sequence[Question], answers: list) -> tuple[str, str]:
    """Which questions are answered wrongly, when no single mistake explains everything."""
    bad = [q for q, answer in zip(questions, answers, strict=True) if not _same(answer, due(q))]
    of_precision = {q[1] for q in bad}
    of_optimizer = {q[2] for q in bad}
    good = [q for q in questions if q not in bad]
    if len(of_optimizer) < len(OPTIMIZERS) and not of_optimizer & {q[2] for q in good if q[1] in of_precision}:
        return "wrong_optimizer", f"what {', '.join(sorted(of_optimizer))} keeps for each parameter is something else."
    if len(of_precision) < len(PRECISIONS):
        return "wrong_precision", f"the answers for {', '.join(sorted(of_precision))} are wrong, the others are right."
    which = ["parameters", "gradients", "optimizer"]
    off = [name for at, name in enumerate(which) if any(not _same([a[at]], [due(q)[at]]) for q, a in
           zip(questions, answers, strict=True))]  # fmt: skip
    return "wrong_bytes", f"the bytes of {' and '.join(off)} are others."
