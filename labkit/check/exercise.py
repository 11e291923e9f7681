"""What an exercise is, and what a judge says about an answer.

Two frozen records and the few ways to make a Verdict. The exercises themselves stand in `labkit.labs`; how a
verdict is shown, stored and raised is `labkit.check.check`. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STAGES = ("attempted", "shape", "values", "agree", "serial", "evidence")


@dataclass(frozen=True)
class Verdict:
    """What a judge found. A judge stops at the first failure, in the order of STAGES.

    stage: the last stage that was looked at (a pass carries "evidence").
    cause: short code of the failure ("star", "padding", "not_attempted"); "" on a pass.
    sentence: the probable cause in one sentence, in the learner's terms; on a pass, what was shown.
    tried: the call that failed, e.g. "world_size=5, root=3, tensor of 7 float32".
    got, expected: short texts of the two values that differ; "" where there is no such pair.
    score: the share of the exercise's points that was earned, from 0.0 to 1.0.
    """

    passed: bool
    stage: str
    cause: str = ""
    sentence: str = ""
    tried: str = ""
    got: str = ""
    expected: str = ""
    score: float = 0.0


@dataclass(frozen=True)
class Exercise:
    """One exercise. `judge(fn, seed)` runs the learner's `fn`, a function or a class, on ranks, compares in the
    parent, looks at evidence.

    id: "0.2": the number of the lab, a dot, the number within the lab.
    name: the name of the learner's function or class; a check finds it by this name.
    points: what a full score is worth.
    The `fn` that a judge is given may be sealed: it can be sent to ranks, not called in the parent.
    """

    id: str
    name: str
    title: str
    minutes: int
    points: int
    judge: Callable[[Callable, int], Verdict]

    @property
    def is_class(self) -> bool:
        """Whether a class is asked for: its name begins with a capital."""
        return self.name[:1].isupper()


def right(sentence: str = "", tried: str = "") -> Verdict:
    """A pass with the full score."""
    return Verdict(True, "evidence", sentence=sentence, tried=tried, score=1.0)


def wrong(stage: str, cause: str, sentence: str, tried: str = "", got: object = "", expected: object = "") -> Verdict:
    """A failure at `stage`. `got` and `expected` may be any value; they are put into words here.

    Raises ValueError for a stage that is not one of STAGES.
    """
    if stage not in STAGES:
        raise ValueError(f"stage {stage!r} is not one of {', '.join(STAGES)}")
    return Verdict(False, stage, cause, sentence, tried, _words(got), _words(expected))


def not_attempted(name: str) -> Verdict:
    """The verdict on an untouched stub."""
    return Verdict(False, "attempted", "not_attempted", f"{name} is still a stub: its body is yet to be written.")


def _words(value: object, limit: int = 300) -> str:
    text = value if isinstance(value, str) else " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 4] + " ..."
