"""check("0.2"): judge the learner's answer, show a card, keep the points, and raise when it is not right yet.

A check must raise to fail: a cell that only displays is a passing cell to nbval. The order of a check:
attempted? shape and type? values? ranks agree? equals the serial run? evidence? It stops at the first
failure. Left out: the exercises' own judges (`labkit.labs`) and grading many submissions.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable

from labkit.check import card, compare, find, pristine, progress, sealed
from labkit.check.exercise import Exercise, Verdict, not_attempted, wrong


class CheckFailed(AssertionError):
    """An exercise is not passed yet.

    `exercise` and `verdict` say which and why; the message says it in a line. shown: the card is there as HTML.
    """

    def __init__(self, exercise: Exercise, verdict: Verdict, shown: bool = False):
        kept = card.points_kept(exercise, verdict)
        super().__init__(f"{card.headline(exercise, verdict, kept)}: {verdict.sentence}")
        self.exercise, self.verdict, self.shown = exercise, verdict, shown

    def __reduce__(self) -> tuple:
        return type(self), (self.exercise, self.verdict, self.shown)

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of a traceback; if this raised, IPython 9 would report no error
        # at all.
        try:
            return [card.failed_line(self.exercise, self.verdict, self.shown)]
        except Exception as error:
            return [f"CheckFailed ({type(error).__name__} while putting it into words)"]


def check(exercise_id: str, fn: Callable | None = None) -> None:
    """Check exercise "0.2": shows a card and stores the result. Returns None on a pass.

    fn: the function or class to judge; by default what has the exercise's name among the caller's globals.
    Raises CheckFailed when it does not pass, ValueError when there is no such exercise.
    """
    exercise = find.exercise(exercise_id)
    if fn is None:
        fn = find.function(exercise.name)
    source = "" if fn is None else sealed.source_of(fn)
    notes = [progress.tried(exercise.id, source, exercise.points).warning]
    with card.waiting(exercise) if fn is not None and not sealed.is_stub(fn) else contextlib.nullcontext():
        verdict = judged(exercise, fn)
    saved = progress.judged(
        exercise.id, source, verdict.passed, card.points(exercise, verdict), exercise.points, verdict.cause
    )
    notes.append(saved.warning)
    card.show(exercise, verdict, tuple(dict.fromkeys(filter(None, notes))))
    if not verdict.passed:
        raise CheckFailed(exercise, verdict, shown=card.in_notebook())


def judged(exercise: Exercise, fn: Callable | None, seed: int | None = None) -> Verdict:
    """The verdict on `fn`, without showing or storing it.

    The answer is pickled first and the seed drawn afterwards. Before and after, the entries that the
    verdict rests on are compared with what was installed; a changed one is refused with the cause
    "patched".
    """
    kind = "class" if exercise.is_class else "function"
    if fn is None:
        sentence = f"there is no {kind} {exercise.name} yet. Run the cell that defines it, then check again."
        return Verdict(False, "attempted", "not_attempted", sentence)
    if not callable(fn):
        sentence = f"{exercise.name} is {compare.kind(fn)}, not a {kind}: another cell gave the name another value."
        return wrong("attempted", "not_a_function", sentence, exercise.name)
    if sealed.is_stub(fn):
        return not_attempted(exercise.name)
    refused = _patched(exercise)
    if refused is not None:
        return refused
    from labkit.ranks.outcome import LaunchError

    try:
        payload = sealed.seal(fn)
    except LaunchError as error:
        return wrong("attempted", "unpicklable_function", f"{error}.", exercise.name)
    except Exception as error:  # a __reduce__ of the learner's own can raise anything
        sentence = f"{exercise.name} cannot be sent to the ranks ({type(error).__name__}: {error})."
        return wrong("attempted", "unpicklable_function", sentence, exercise.name)
    return verdict_on(exercise, payload, sealed.fresh_seed() if seed is None else seed)


def verdict_on(exercise: Exercise, payload: sealed.Sealed, seed: int) -> Verdict:
    """The judge's verdict on a sealed function, unless something was patched by the time it is given.

    A judge that fails itself, on whatever a rank sent back, gives the cause "check_error": never a pass, nor a
    bare traceback. Ctrl-C passes through.
    """
    try:
        verdict = exercise.judge(payload, seed)
        if type(verdict) is not Verdict or type(verdict.passed) is not bool:
            raise TypeError(f"the judge gave {type(verdict).__name__}, not a verdict")
    except Exception as error:
        verdict = _check_error(exercise, error)
    return _patched(exercise) or verdict


def _check_error(exercise: Exercise, error: Exception) -> Verdict:
    from labkit.ranks.outcome import LaunchError

    if isinstance(error, LaunchError):
        return wrong("attempted", "no_launch", f"the check could not start its ranks: {error}.", exercise.name)
    where = traceback.extract_tb(error.__traceback__)[-1]
    sentence = (
        "the check itself failed, so nothing is said about your answer. It met something in the results that it "
        "did not expect; please report it."
    )
    got = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}, line {where.lineno})"
    return wrong("evidence", "check_error", sentence, exercise.name, got, "a verdict")


def mine_or(fn: Callable, reference: Callable, whose: str = "") -> tuple[Callable, str]:
    """(reference, "not yet yours: " and whose) while fn is a stub, else (fn, note), noted until it passed as it stands.

    whose: what the reference is ("torch's AdamW"); "" leaves it and the colon out.
    The note of an answer of one's own is "yours, not passed yet", or "" after its check; "" too where Python does not
    know its source. For the cells after a check, so that a picture is drawn either way and its title tells whose
    work it shows.
    """
    if sealed.is_stub(fn):
        return reference, f"not yet yours: {whose}" if whose else "not yet yours"
    source, (data, _) = sealed.source_of(fn)[: progress.MAX_SOURCE], progress.load()
    passed = [entry["answer"]["passed"] for entry in data["exercises"].values()]
    return fn, "yours, not passed yet" if source and source not in passed else ""


def _patched(exercise: Exercise) -> Verdict | None:
    try:
        name = pristine.first_patched()
    except Exception as error:  # a module's source that is no longer there or no longer Python, say
        name = f"some module of labkit ({type(error).__name__}: {error})"
    if not name:
        return None
    sentence = (
        f"{name} is not what is installed, so this session cannot judge: it was replaced, or labkit was updated "
        "after the kernel started. Restart the kernel and run the cells again without replacing it."
    )
    return wrong("evidence", "patched", sentence, exercise.name)
