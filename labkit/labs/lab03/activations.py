"""Judge of exercise 3.2, `activation_bytes`: what one layer keeps for its backward, in two conventions.

`megatron` is exact: s b h (34 + 5 a s / h) for GPT's layer (arXiv:2205.05198, equation 1), and the same rule, every
operation keeps its input, for Llama's. `eager` must come within 1% of what autograd really holds: a rank of its own,
without the answer in it, runs forwards of labkit's Llama with 3 layers and with 1, and half the difference is due.
A wrong answer is recognised by what known mistakes would return. Left out: tensor parallelism, recomputation, and the
head, which are `labkit.cost`'s.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab00.attempts as attempts
import labkit.labs.lab03.activations_told as told
import labkit.labs.lab03.own_work as own_work
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.cost.shapes import Shape

NAME = "activation_bytes"
ARGUMENTS = "shape, batch, seq, element_bytes, convention"
NUM_RANKS = 2
WITHIN = {"megatron": 1e-9, "eager": 0.01}


@dataclass(frozen=True)
class Question:
    """One call: a layer of this shape on batch sequences of seq tokens."""

    shape: Shape
    batch: int
    seq: int
    element_bytes: int
    convention: str

    @property
    def args(self) -> tuple:
        return self.shape, self.batch, self.seq, self.element_bytes, self.convention

    def __str__(self) -> str:
        s = self.shape
        what = f"{s.name}: hidden={s.hidden}, heads={s.heads}, kv_heads={s.kv_heads}, ffn={s.ffn}"
        return (
            f"activation_bytes({what}; batch={self.batch}, seq={self.seq}, {self.element_bytes}, {self.convention!r})"
        )


def judge(fn: Callable, seed: int) -> Verdict:
    """Llama's layer by both conventions, in fp32 and bf16, with and without grouped heads; GPT's by the paper's."""
    questions = _questions(random.Random(seed))
    tried = f"on {NUM_RANKS} ranks"
    seen = evidence.observe(_answers, NUM_RANKS, args=(fn, questions))
    failed = attempts.ran(seen, NAME, tried)
    if failed is not None:
        return failed
    due = _due(questions)
    for answers, _ in seen.results:
        found = _wrong_type(questions, answers) or _wrong_value(questions, answers, due)
        if found is not None:
            return found
    found = _own_work(seen, tried) or evidence.no_communication(seen, tried) or honest(seen, tried)
    if found is not None:
        return found
    off = max(
        abs(answer / held - 1)
        for question, answer, held in zip(questions, seen.results[0][0], due, strict=True)
        if question.convention == "eager"
    )
    return right(f"the papers' bytes exactly; within {off:.1%} of the bytes that autograd held for a layer, live")


def _questions(rng: random.Random) -> list[Question]:
    found = []
    for convention in ("megatron", "eager"):
        for element_bytes in (2, 4):
            for kv_share in (1, 2, 4):
                heads = 4 * rng.randint(1, 3)
                shape = _llama(16 * heads, heads, heads // kv_share, rng.randint(90, 400))
                batch = 1 if kv_share == 2 else rng.randint(2, 3)
                found.append(Question(shape, batch, rng.randint(20, 120), element_bytes, convention))
    for _ in range(3):
        heads = rng.choice((8, 12, 16))
        gpt = Shape("GPT", 2, 64 * heads, heads, heads, 64, 256 * heads, 1000, gated=False, biases=True)
        found.append(Question(gpt, rng.randint(2, 8), 128 * rng.randint(2, 16), 2, "megatron"))
    return rng.sample(found, len(found))


def _llama(hidden: int, heads: int, kv_heads: int, ffn: int) -> Shape:
    return Shape("Llama", 2, hidden, heads, kv_heads, hidden // heads, ffn, 97)


def _answers(fn: Callable, questions: Sequence[Question]) -> Any:
    """Runs in a rank: (answers, what it borrowed). A stub is told apart; numpy's numbers are numbers too."""
    import numbers

    answers = []
    for question in questions:
        answer = attempts.called(fn, ARGUMENTS, *question.args)
        if attempts.no_result(answer):
            return answer
        plain = isinstance(answer, numbers.Real) and not isinstance(answer, bool)
        answers.append(float(answer) if plain else None if answer is None else kind(answer))
    return answers, own_work.borrowed(fn)


def _own_work(seen: Observed, tried: str) -> Verdict | None:
    for (_, borrowed), record in zip(seen.results, seen.records, strict=True):
        if borrowed:
            return own_work.verdict(borrowed, tried)
        if record.flops:
            sentence = "a forward was run to see what is kept: count it from the shape, without running anything."
            return wrong("evidence", "measures", sentence, tried, f"{record.flops} FLOPs", "arithmetic")
    return None


def measured(questions: Sequence[Question]) -> list[int]:
    """Runs in a rank without the answer: bytes that autograd holds for a layer, by a live forward."""
    import labkit.labs.lab03.saved as saved

    return [saved.layer_bytes(q.shape, q.batch, q.seq, q.element_bytes) for q in questions]


def _due(questions: Sequence[Question]) -> list[float]:
    from labkit.ranks.launch import launch

    live = [q for q in questions if q.convention == "eager"]
    held = iter(launch(measured, 1, live, prints="quiet", backend="gloo")[0])
    return [next(held) if q.convention == "eager" else told.due(*q.args) for q in questions]


def _wrong_type(questions: Sequence[Question], answers: list) -> Verdict | None:
    for question, answer in zip(questions, answers, strict=True):
        if answer is None:
            sentence = f"nothing came back for convention {question.convention!r}: a `return` is missing."
            return wrong("shape", "returns_nothing", sentence, str(question), "None", "a number of bytes")
        if type(answer) is not float or not math.isfinite(answer):
            sentence = "the answer is one number: bytes of one layer."
            return wrong("shape", "not_a_number", sentence, str(question), answer, "a number of bytes")
    return None


def _wrong_value(questions: Sequence[Question], answers: Sequence[float], due: Sequence[float]) -> Verdict | None:
    """The papers' convention first, and within it Llama's: eager builds on it."""
    order = sorted(
        range(len(questions)), key=lambda at: (questions[at].convention != "megatron", -questions[at].shape.gated)
    )
    for at in order:
        question, answer = questions[at], answers[at]
        if abs(answer - due[at]) <= WITHIN[question.convention] * due[at]:
            continue
        like = [i for i in range(len(questions)) if _alike(questions[i], question)]
        asked = [questions[i].args for i in like]
        cause, sentence = told.mistake(asked, [answers[i] for i in like], [due[i] for i in like])
        within = "" if question.convention == "megatron" else f", within 1%: autograd held {due[at]:,.0f}"
        got = f"{answer:,.0f} bytes"
        return wrong("values", cause, sentence, str(question), got, f"{due[at]:,.0f} bytes{within}")
    return None


def _alike(one: Question, other: Question) -> bool:
    """Whether one mistake should explain the answers to both."""
    return one.convention == other.convention and one.shape.gated == other.shape.gated
