"""Judge of exercise 7.1, `split_stages`: layers for stages, of which the first and the last have more to do.

The function is arithmetic: it is asked many questions on two ranks. Any split whose slowest stage is as fast as can be
is right; a wrong one is recognised by being the best for another question (no head, say). Left out: layers that
differ from each other, and memory.
"""

from __future__ import annotations

import math
import numbers
import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab03.own_work as own_work
from labkit.check import evidence
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.attempts import Unusable
from labkit.labs.lab07.pictures import stage_times

NAME = "split_stages"
Question = tuple[int, int, float, float]  # layers, stages, embedding and head in layers' worth of time
EXAMPLE: Question = (16, 4, 0.5, 2.5)


def judge(fn: Callable, seed: int) -> Verdict:
    """The example, one stage, as many stages as layers, and random questions."""
    questions = ask(random.Random(seed))
    observed = evidence.observe(_answers, 2, args=(fn, questions), deadline_s=60.0)
    tried = "on 2 ranks"
    found = attempts.ran(observed, NAME, tried)
    if found is not None:
        return found
    answers = observed.results[0]
    if isinstance(answers[0], list) and answers[0] and all(answer == answers[0] for answer in answers):
        sentence = "the same list comes back whatever is asked: the example's answer by heart."
        return wrong("values", "hard_coded", sentence, tried, answers[0], "a list for each question")
    for question, answer in zip(questions, answers, strict=True):
        found = _no_split(question, answer)
        if found is not None:
            return found
    for question, answer in zip(questions, answers, strict=True):
        if not is_best(answer, *question):
            return _unbalanced(questions, answers, question, answer)
    found = evidence.ranks_agree(observed, tried) or evidence.no_communication(observed, tried)
    return found or honest(observed, tried) or right(f"as even as can be, for {len(questions)} models")


def ask(rng: random.Random) -> list[Question]:
    """Questions; times are multiples of a quarter, so that sums are exact."""
    drawn = [(rng.randint(4, 12), 1, 0.5, 1.25), (6, 6, 0.25, 1.5)]
    for _ in range(30):
        stages = rng.randint(2, 8)
        drawn.append((stages * rng.randint(2, 9) + rng.randint(0, 7), stages, rng.randint(0, 12) / 4,
                      rng.randint(0, 20) / 4))  # fmt: skip
    return [EXAMPLE, *rng.sample(drawn, len(drawn))]


def _answers(fn: Callable, questions: list[Question]) -> Any:
    """Runs in a rank."""
    found = own_work.borrowed(fn, ("labkit.schedule", "labkit.model"))
    if found:
        return Unusable("ready_made", own_work.verdict(found, "").sentence)
    answers = []
    for question in questions:
        out = attempts.called(fn, "layers, num_stages, embedding, head", *question)
        if attempts.no_result(out):
            return out
        answers.append(_plain(out))
    return answers


def _plain(out: Any) -> Any:
    """A list where it is one, numpy's and torch's whole numbers as Python's; else what came, in words."""
    if type(out).__module__ in ("numpy", "torch") and hasattr(out, "tolist"):
        out = out.tolist()
    if not isinstance(out, (list, tuple)):
        return repr(out)
    return [int(each) if isinstance(each, numbers.Integral) and type(each) is not bool else each for each in out]


def slowest(split: list[int], embedding: float, head: float) -> float:
    """Time of the slowest stage, in layers."""
    return max(stage_times(split, embedding, head))


def best(layers: int, stages: int, embedding: float, head: float) -> float:
    """The least that the slowest stage can take, every stage having one layer or more."""
    if stages == 1:
        return layers + embedding + head
    for time in sorted(count + more for count in range(1, layers + 1) for more in (0, embedding, head)):
        room = [math.floor(time - embedding), *[math.floor(time)] * (stages - 2), math.floor(time - head)]
        if min(room) >= 1 and sum(room) >= layers:
            return time
    raise ValueError(f"{layers} layers for {stages} stages")


def is_best(split: list[int], layers: int, stages: int, embedding: float, head: float) -> bool:
    """Whether no split has a faster slowest stage."""
    return slowest(split, embedding, head) <= best(layers, stages, embedding, head)


def _call(question: Question) -> str:
    return f"{NAME}({', '.join(map(str, question))})"


def _no_split(question: Question, answer: Any) -> Verdict | None:
    layers, stages, _, _ = question
    if not isinstance(answer, list) or any(type(count) is not int for count in answer):
        sentence = "the answer is a list of whole numbers: how many layers each stage has."
        if answer == "None":
            sentence = f"nothing comes back: is there a return? {sentence[0].upper()}{sentence[1:]}"
        return wrong("shape", "wrong_type", sentence, _call(question), answer, f"a list of {stages} whole numbers")
    if len(answer) != stages:
        sentence = f"{stages} stages were asked for."
        return wrong("shape", "wrong_count", sentence, _call(question), answer, f"a list of {stages}")
    if sum(answer) != layers:
        sentence = f"{'layers are lost' if sum(answer) < layers else 'there are more layers than the model has'}."
        return wrong("values", "layers_lost", sentence, _call(question), f"{answer}, in all {sum(answer)}", layers)
    if min(answer) < 1:
        sentence = f"stage {answer.index(min(answer))} has no layer: every stage has one or more."
        return wrong("values", "empty_stage", sentence, _call(question), answer, "one or more each")
    return None


def _to_even(embedding: float, head: float) -> tuple[int, int]:
    """As Python rounds: halves to the even number."""
    return round(embedding), round(head)


# An answer that is the best for rounded times is off by less than a layer, whatever it was that its author rounded.
_ROUNDED = "the slowest stage is slower by a part of a layer: were times or counts rounded? Half a layer counts."
# What a known mistake makes of embedding and head, cause and sentence.
_MISTAKES = (
    (lambda e, h: (0, 0), "ends_forgotten", "layers are even, but the first stage has the embedding and the last the "
     "head besides."),
    (lambda e, h: (e, 0), "head_forgotten", "the last stage has the head besides its layers."),
    (lambda e, h: (0, h), "embedding_forgotten", "the first stage has the embedding besides its layers."),
    (lambda e, h: (h, e), "ends_swapped", "embedding and head are swapped: the head is the last stage's."),
    (lambda e, h: (e // 1, h // 1), "rounded", _ROUNDED),
    (lambda e, h: (-(-e // 1), -(-h // 1)), "rounded", _ROUNDED),
    (lambda e, h: ((e + 0.5) // 1, (h + 0.5) // 1), "rounded", _ROUNDED),
    (_to_even, "rounded", _ROUNDED),
)  # fmt: skip


def _unbalanced(questions: list[Question], answers: list, question: Question, answer: list[int]) -> Verdict:
    cause, sentence = "not_balanced", "a stage is slower than it need be: move a layer from it to another."
    for changed, name, told in _MISTAKES:
        if all(is_best(a, q[0], q[1], *changed(q[2], q[3])) for q, a in zip(questions, answers, strict=True)):
            cause, sentence = name, told
            break
    got = f"{answer}: the slowest stage takes {slowest(answer, *question[2:]):g} layers' time"
    return wrong("values", cause, sentence, _call(question), got, f"{best(*question):g}")
