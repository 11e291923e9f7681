"""The card that a check shows: HTML in a notebook, plain text elsewhere, and the score for a machine to read.

The card takes the page's own colours and says in words what its colour says, so it reads in dark themes and
without colours. Everything that came from a learner is escaped. A pass of an earlier day is in the progress file,
and the card says so. Left out: figures; a lab's cells draw those.
"""

from __future__ import annotations

import html
import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from labkit.check import progress
from labkit.check.exercise import Exercise, Verdict

MIME = "application/vnd.labkit.check+json"
_WIDTH = 100
_CARD = (
    "border:1px solid;border-left-width:6px;border-radius:4px;padding:.5em .9em;margin:.3em 0;max-width:60em;"
    "color:inherit;background:transparent;"
)
# At least 3 to 1 against white and against the backgrounds of dark themes (WCAG 2.2, 1.4.11).
_COLOURS = {"passed": "#2f9160", "not attempted yet": "#808080", "not yet": "#d9600f"}
_MARKS = {"passed": "&#10003;", "not attempted yet": "&#9675;", "not yet": "&#10007;"}
_CELL = "text-align:left;vertical-align:top;padding:1px 1em 1px 0;background:none;white-space:pre-wrap;"
_MONOSPACE = "font-family:monospace,monospace;font-size:.95em;"
_VALUES = ("Got", "Expected")  # one below the other, digit below digit


def headline(exercise: Exercise, verdict: Verdict, kept: float = 0.0) -> str:
    """One line: "0.2 Broadcast: passed, 2 of 2 points". kept: points of an earlier pass; see `points_kept`."""
    begin = f"{exercise.id} {exercise.title}: {_state(verdict)}"
    if kept:
        stay = "1 point stays" if kept == 1 else f"{kept:g} points stay"
        return f"{begin} (passed before; your {stay})"
    return f"{begin}, {points(exercise, verdict):g} of {exercise.points} points"


def points_kept(exercise: Exercise, verdict: Verdict) -> float:
    """Points of a pass that is in the progress file, when `verdict` is none; else 0.0."""
    data, _ = progress.load()
    entry = data["exercises"].get(exercise.id)
    return entry["score"] if entry and entry["passed"] and not verdict.passed else 0.0


def failed_line(exercise: Exercise, verdict: Verdict, shown: bool) -> str:
    """What stands where a traceback would. shown: the card is there to be seen, so it is not said twice."""
    if shown:
        return f"CheckFailed {exercise.id}: see the card above"
    return f"CheckFailed: {headline(exercise, verdict, points_kept(exercise, verdict))}: {verdict.sentence}"


def _state(verdict: Verdict) -> str:
    return "not attempted yet" if verdict.cause == "not_attempted" else "passed" if verdict.passed else "not yet"


def points(exercise: Exercise, verdict: Verdict) -> float:
    """Points earned, rounded to hundredths."""
    return round(exercise.points * verdict.score, 2)


def text(exercise: Exercise, verdict: Verdict, notes: tuple[str, ...] = (), kept: float = 0.0) -> str:
    """The card as plain lines of at most about 100 characters."""
    lines = [headline(exercise, verdict, kept)]
    if verdict.cause == "not_attempted":
        lines += textwrap.wrap(verdict.sentence, _WIDTH)
    else:
        for label, value in _rows(verdict):
            told = f"{label + ':':<10}{value}".splitlines()
            for number, line in enumerate(told):
                indent = "  " if number == 0 else " " * 12
                lines += textwrap.wrap(line, _WIDTH, initial_indent=indent, subsequent_indent=" " * 12)
    return "\n".join([*lines, *(f"  note: {note}" for note in notes)])


def markup(exercise: Exercise, verdict: Verdict, notes: tuple[str, ...] = (), kept: float = 0.0) -> str:
    """The card as one HTML element without scripts or a style sheet."""
    colour, mark = _COLOURS[_state(verdict)], _MARKS[_state(verdict)]
    head = html.escape(headline(exercise, verdict, kept))
    if verdict.cause == "not_attempted":
        body = f"<div>{html.escape(verdict.sentence)}</div>"
    else:
        rows = "".join(_row(label, value) for label, value in _rows(verdict))
        body = f'<table style="border:none;margin:.3em 0 0 0;color:inherit">{rows}</table>' if rows else ""
    foot = "".join(f'<div style="opacity:.8;margin-top:.3em">{html.escape(note)}</div>' for note in notes)
    return (
        f'<div role="status" aria-label="{head}" style="{_CARD}border-color:{colour}">'
        f'<div style="font-weight:600"><span aria-hidden="true" style="color:{colour}">{mark}</span> {head}'
        f"</div>{body}{foot}</div>"
    )


def _row(label: str, value: str) -> str:
    return (
        f'<tr style="background:none"><th scope="row" style="{_CELL}font-weight:600">{label}</th>'
        f'<td style="{_CELL}{_MONOSPACE if label in _VALUES else ""}">{html.escape(value)}</td></tr>'
    )


def bundle(exercise: Exercise, verdict: Verdict, notes: tuple[str, ...] = (), kept: float = 0.0) -> dict[str, Any]:
    """The MIME bundle: text/html, text/plain and MIME, which holds exercise, score, possible and cause.

    score and possible are points, of this attempt; cause is "" on a pass.
    """
    return {
        "text/html": markup(exercise, verdict, notes, kept),
        "text/plain": text(exercise, verdict, notes, kept),
        MIME: {
            "exercise": exercise.id,
            "score": points(exercise, verdict),
            "possible": exercise.points,
            "cause": verdict.cause,
        },
    }


def show(exercise: Exercise, verdict: Verdict, notes: tuple[str, ...] = ()) -> None:
    """Display the bundle in a notebook; print the text anywhere else."""
    kept = points_kept(exercise, verdict)
    if not in_notebook():
        print(text(exercise, verdict, notes, kept), flush=True)
        return
    from IPython.display import display

    display(bundle(exercise, verdict, notes, kept), raw=True)


@contextmanager
def waiting(exercise: Exercise) -> Iterator[None]:
    """While the block runs, a notebook says that the exercise is being checked; afterwards the line is empty."""
    if not in_notebook():
        yield
        return
    from IPython.display import HTML, display

    told = html.escape(f"Checking {exercise.id} {exercise.title} on live ranks: up to a quarter of a minute ...")
    line = display(HTML(f'<div role="status" style="opacity:.8">{told}</div>'), display_id=True)
    try:
        yield
    finally:
        line.update(HTML(""))


def in_notebook() -> bool:
    """True in a Jupyter kernel (Colab too); False in a terminal, in IPython's as well, and in a script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


def _rows(verdict: Verdict) -> list[tuple[str, str]]:
    rows = [
        ("Tried", verdict.tried),
        ("Got", _by_rank(verdict.got)),
        ("Expected", _by_rank(verdict.expected)),
        ("Shown" if verdict.passed else "Why", verdict.sentence),
    ]
    return [(label, value) for label, value in rows if value]


def _by_rank(value: str) -> str:
    """ "rank 0: ...; rank 1: ..." with a line for each rank."""
    return value.replace("; rank ", "\nrank ")


def to_json(verdict: Verdict) -> str:
    """A verdict as one line of JSON; `from_json` reads it back."""
    return json.dumps(vars(verdict))


def from_json(line: str) -> Verdict:
    """Raises ValueError or TypeError for a line that holds no verdict."""
    return Verdict(**json.loads(line))
