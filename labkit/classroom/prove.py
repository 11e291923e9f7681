"""Try a lab's checks on answers whose verdict is known: `labkit prove 00`.

tests/mistakes/lab00.py holds, per exercise, WRONG = {"0.2": [(fn, "star"), ...]} (refused, and told that
cause), RIGHT = {"0.2": [fn, ...]} (accepted) and CHEATS = {"0.2": [(fn, "patched"), ...]} (refused, and
told that cause). A cause may also be a tuple of causes. A cheat with an attribute `notebook`, a function,
runs it first in the session that judges, as a notebook's cell would; such a row has a process of its own.
Each exercise needs at least 5 wrong and 2 right answers; an untouched stub and a missing function are tried
as well. Left out: pytest; tests/classroom runs the same rows.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from labkit.check import card, check, find, sealed
from labkit.check.exercise import Exercise, Verdict
from labkit.check.table import table
from labkit.classroom.build import find_root

MIN_WRONG, MIN_RIGHT = 5, 2
_BOOT = (
    "import sys; sys.path[:] = {path!r}; from labkit.classroom import prove; "
    "prove.answer({file!r}, {exercise!r}, {number!r}, {seed!r})"
)


@dataclass(frozen=True)
class Row:
    """One answer.

    causes: what it must be told; () for one that must pass. number: its place among the cheats.
    """

    exercise: Exercise
    kind: str
    fn: Callable | None
    causes: tuple[str, ...]
    number: int = 0

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", "(no function)")


def main(number: str, root: Path | None = None) -> int:
    """Print one line per answer of lab "00". Returns 0 when every verdict is as expected, else 1.

    Raises ValueError when there is no such lab, or no mistakes for it.
    """
    number = number.removeprefix("lab").zfill(2)
    exercises = find.lab(number).EXERCISES
    file = mistakes_file(number, root)
    mistakes = load(file)
    seed, began = sealed.fresh_seed(), time.monotonic()
    print(f"lab {number}, seed {seed} (LABKIT_SEED={seed} repeats it)", flush=True)
    misses, lines = shortages(exercises, mistakes), []
    for row in rows(exercises, mistakes):
        verdict = judge(row, file, seed)
        ok = as_expected(row, verdict)
        told = "accepted" if verdict.passed else verdict.cause
        wanted = " or ".join(row.causes) or "accepted"
        lines.append((row.exercise.id, row.kind, row.name, wanted, told, "ok" if ok else "MISS"))
        if not ok:
            misses.append(f"{row.exercise.id} {row.name}: {wanted} expected, {told}: {verdict.sentence}")
            misses[-1] += f" [tried {verdict.tried}; got {verdict.got}; expected {verdict.expected}]"
        print(" ".join(("." if ok else "MISS", *lines[-1][:3])), file=sys.stderr, flush=True)
    print(table(("exercise", "kind", "answer", "expected", "told", ""), lines))
    print("\n".join([*misses, f"{len(lines)} answers, {len(misses)} misses, {time.monotonic() - began:.0f} s"]))
    return 1 if misses else 0


def mistakes_file(number: str, root: Path | None = None) -> Path:
    """tests/mistakes/labNN.py of the clone. Raises ValueError when it is not there."""
    file = (root or find_root()) / "tests" / "mistakes" / f"lab{number}.py"
    if not file.is_file():
        raise ValueError(f"there are no mistakes for lab {number}: {file} is missing")
    return file


def load(file: Path) -> ModuleType:
    """The mistakes, loaded by path. They and the files beside them travel to ranks whole, not by name."""
    import cloudpickle

    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"mistakes_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for other in list(sys.modules.values()):
        path = getattr(other, "__file__", None)
        if path and Path(path).parent == file.parent:
            cloudpickle.register_pickle_by_value(other)
    return module


def rows(exercises: tuple[Exercise, ...], mistakes: ModuleType) -> Iterator[Row]:
    """Every answer of every exercise: stub, missing, wrong, cheats, right."""
    for exercise in exercises:
        yield Row(exercise, "stub", _stub, ("not_attempted",))
        yield Row(exercise, "missing", None, ("not_attempted",))
        for kind, answers in (("wrong", mistakes.WRONG), ("cheat", mistakes.CHEATS)):
            for number, (fn, cause) in enumerate(answers.get(exercise.id, ())):
                yield Row(exercise, kind, fn, (cause,) if isinstance(cause, str) else tuple(cause), number)
        for fn in mistakes.RIGHT.get(exercise.id, ()):
            yield Row(exercise, "right", fn, ())


def shortages(exercises: tuple[Exercise, ...], mistakes: ModuleType) -> list[str]:
    """Exercises with too few answers to prove anything, and answers to exercises that do not exist."""
    found = []
    for exercise in exercises:
        for kind, answers, least in (
            ("wrong", mistakes.WRONG, MIN_WRONG),
            ("right", mistakes.RIGHT, MIN_RIGHT),
        ):
            count = len(answers.get(exercise.id, ()))
            if count < least:
                found.append(f"{exercise.id} has {count} {kind} answers; at least {least}")
    known = {e.id for e in exercises}
    unknown = {i for answers in (mistakes.WRONG, mistakes.RIGHT, mistakes.CHEATS) for i in answers} - known
    return found + [f"there is no exercise {i}" for i in sorted(unknown)]


def judge(row: Row, file: Path, seed: int) -> Verdict:
    """The verdict on one answer; in a process of its own where a cheat also has a cell to run."""
    if not hasattr(row.fn, "notebook"):
        return check.judged(row.exercise, row.fn, seed)
    boot = _BOOT.format(path=sys.path, file=str(file), exercise=row.exercise.id, number=row.number, seed=seed)
    done = subprocess.run([sys.executable, "-c", boot], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return Verdict(False, "attempted", "no_verdict", done.stderr.strip()[-500:])
    return Verdict(**json.loads(lines[-1]))


def answer(file: str, exercise_id: str, number: int, seed: int) -> None:
    """In a process of its own:

    run the cheat's cell, then judge it. The verdict is the last line of stdout.
    """
    mistakes = load(Path(file))
    exercise = find.exercise(exercise_id)
    fn = mistakes.CHEATS[exercise_id][number][0]
    fn.notebook()
    print(card.to_json(check.judged(exercise, fn, seed)), flush=True)


def as_expected(row: Row, verdict: Verdict) -> bool:
    """Whether a verdict is the one that the row must get."""
    return verdict.cause in row.causes and not verdict.passed if row.causes else verdict.passed


def _stub(*args, **kwargs):
    return NotImplemented
