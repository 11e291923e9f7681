"""Points, answers and predictions on disk, so that nothing is lost when a kernel dies.

One JSON file, `progress.json` in LABKIT_HOME (by default ~/.labkit):

    {"version": 1, "exercises": {"0.2": {"passed": true, "score": 2.0, "possible": 2, "attempts": 3,
"cause": "", "first_passed": "2026-01-31T10:00:00+00:00", "last_tried": "...", "answer": {"tried": "def
broadcast(...", "passed": "def broadcast(..."}}}, "predictions": {"0.a": {"value": 12.0, "unit": "ms",
"predicted": "...", "actual": 9.5, "log_error": 0.1}}, "revealed": {"0.b": "2026-01-31T10:05:00+00:00"}}

"revealed": when an outcome was shown for which there was no prediction; the key is there once there is one.

Written to a temporary file, synced and renamed, under a lock that two kernels share. Where that folder
cannot be written, a folder of one's own under the system's temporary folder takes its place, and the two
are read as one. Left out: accounts, servers, and anything about the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows; the files are still replaced whole
    fcntl = None

VERSION = 1
NAME = "progress.json"
LOCK = "progress.lock"
MAX_SOURCE = 100_000
UNTOUCHED = "not_attempted"  # the cause of a stub's verdict
_LOCK_DEADLINE_S = 5.0


@dataclass(frozen=True)
class Saved:
    """The data after a change, where it lies ("" when nowhere), and one line for the learner, or ""."""

    data: dict
    path: str
    warning: str


def home() -> Path:
    """The folder of the learner's own files: LABKIT_HOME, else ~/.labkit."""
    return Path(os.environ.get("LABKIT_HOME") or Path.home() / ".labkit")


def spare() -> Path:
    """The folder that is used when `home` cannot be written."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"labkit-{user}"


def load(repair: bool = False) -> tuple[dict, str]:
    """What is stored, home and spare read as one, and a line for the learner about a file that was broken,
    or "".

    repair: also put a broken file aside; only for whoever holds the lock.
    """
    data, warnings = empty(), []
    for folder in _folders():
        found, warning = _read(folder / NAME, repair)
        data = merged(data, found)
        warnings.append(warning)
    return data, " ".join(filter(None, warnings))


def update(change: Callable[[dict], None]) -> Saved:
    """Apply `change` to the stored data, in place, and store it. Never raises for what the disk did."""
    first = ""
    for folder in (home(), spare()):
        try:
            data, warning = _update_in(folder, change)
        except OSError as error:
            first = first or f"{folder / NAME} cannot be written ({error.strerror or error})"
            continue
        if first:
            warning = f"{first}; your progress is kept in {folder} for now. LABKIT_HOME can name another folder."
        return Saved(data, str(folder / NAME), warning)
    data, _ = load()
    change(data)
    return Saved(
        data,
        "",
        f"{first}, nor can {spare()}: this result counts, but is not stored. Make room and check again.",
    )


def tried(exercise_id: str, source: str, possible: float) -> Saved:
    """Store an answer's source before it is judged, so that a kernel that dies meanwhile loses nothing.

    It becomes an attempt when it is judged: an interrupted check is none.
    """

    def change(data: dict) -> None:
        entry = data["exercises"].setdefault(exercise_id, _new_exercise(possible))
        entry.update(last_tried=now(), possible=possible)
        entry["answer"]["tried"] = source[:MAX_SOURCE]

    return update(change)


def judged(exercise_id: str, source: str, passed: bool, score: float, possible: float, cause: str) -> Saved:
    """Store a verdict.

    The best score stays; `cause` is that of the last attempt; a pass once earned stays. A stub, cause
    "not_attempted", is no attempt and changes nothing of what real ones left.
    """

    def change(data: dict) -> None:
        entry = data["exercises"].setdefault(exercise_id, _new_exercise(possible))
        if cause == UNTOUCHED:
            entry.update(possible=possible, cause=entry["cause"] if entry["attempts"] else cause)
            return
        entry.update(score=max(score, entry["score"]), possible=possible, cause=cause, attempts=entry["attempts"] + 1)
        if passed:
            entry.update(passed=True, first_passed=entry["first_passed"] or now())
            entry["answer"]["passed"] = source[:MAX_SOURCE]

    return update(change)


def empty() -> dict:
    """Stored data before anything happened."""
    return {"version": VERSION, "exercises": {}, "predictions": {}}


def merged(a: dict, b: dict) -> dict:
    """Two stores as one:

    per exercise the later attempt, and what was earned in either. First predictions win.
    """
    exercises = dict(a["exercises"])
    for key, entry in b["exercises"].items():
        exercises[key] = _merged_exercise(exercises[key], entry) if key in exercises else entry
    predictions = dict(a["predictions"])
    for key, entry in b["predictions"].items():
        other = predictions.get(key, entry)
        predictions[key] = min(other, entry, key=lambda p: p["predicted"])
    both = {"version": VERSION, "exercises": exercises, "predictions": predictions}
    revealed = {**b.get("revealed", {}), **a.get("revealed", {})}
    return {**both, "revealed": revealed} if revealed else both


def _merged_exercise(a: dict, b: dict) -> dict:
    earlier, later = sorted((a, b), key=lambda entry: (entry["last_tried"], entry["attempts"]))
    firsts = sorted(filter(None, (a["first_passed"], b["first_passed"])))
    answer = {
        "tried": later["answer"]["tried"],
        "passed": later["answer"]["passed"] or earlier["answer"]["passed"],
    }
    return {
        **later,
        "passed": a["passed"] or b["passed"],
        "score": max(a["score"], b["score"]),
        "attempts": max(a["attempts"], b["attempts"]),
        "first_passed": firsts[0] if firsts else "",
        "answer": answer,
    }


def _new_exercise(possible: float) -> dict:
    return {
        "passed": False,
        "score": 0.0,
        "possible": possible,
        "attempts": 0,
        "cause": "",
        "first_passed": "",
        "last_tried": "",
        "answer": {"tried": "", "passed": ""},
    }


def now() -> str:
    """UTC, to the second, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _folders() -> list[Path]:
    """Home, and the spare folder if it is there and nobody else's."""
    folder = spare()
    try:
        found = folder.lstat()
    except OSError:
        return [home()]
    return [home(), folder] if _is_ours(found) else [home()]


def _is_ours(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == os.getuid())


def _update_in(folder: Path, change: Callable[[dict], None]) -> tuple[dict, str]:
    """Read, change and replace under the lock. Raises OSError when the folder cannot be written."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder == spare() and not _is_ours(folder.lstat()):
        raise PermissionError(1, "it belongs to somebody else")
    with _locked(folder / LOCK):
        data, warning = load(repair=True)
        change(data)
        _replace(folder / NAME, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    if folder == home():
        with contextlib.suppress(OSError):  # what was kept there is in `data` now
            if spare() != home() and spare() in _folders():
                for name in (NAME, LOCK):
                    (spare() / name).unlink(missing_ok=True)
                spare().rmdir()
    return data, warning


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=".progress-", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock, or go on without it after some seconds:

    a stopped kernel must not hold up another one.
    """
    if fcntl is None:
        yield
        return
    with open(path, "a") as file:
        deadline = time.monotonic() + _LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        yield  # closing the file releases the lock


def _read(path: Path, repair: bool) -> tuple[dict, str]:
    """The file's data. A broken file is put aside, never deleted, and the line says where."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return empty(), ""
    except OSError as error:
        return empty(), f"{path} cannot be read ({error.strerror or error})."
    try:
        return _checked(json.loads(text)), ""
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if not repair:
            return empty(), f"{path} could not be understood ({error})."
        aside = f"{path}.broken-{datetime.now(timezone.utc).strftime('%Y%m%dT%H%M%S.%fZ')}"
        try:
            os.replace(path, aside)
        except OSError:
            aside = str(path)
        return (
            empty(),
            f"{path} could not be understood ({error}); it is kept as {aside}, and a new one begun.",
        )


def _checked(data: Any) -> dict:
    """The data with every field there.

    Raises ValueError and the like for anything else than what is written here.
    """
    if data["version"] != VERSION:
        raise ValueError(f"its version is {data['version']!r}, this labkit knows {VERSION}")
    exercises = {}
    for key, entry in data["exercises"].items():
        whole = {**_new_exercise(0), **entry}
        whole["answer"] = {"tried": "", "passed": "", **whole["answer"]}
        for name, default in _new_exercise(0).items():
            kinds = (int, float) if isinstance(default, (int, float)) else type(default)
            if not isinstance(whole[name], kinds):
                raise ValueError(f"{name} of exercise {key} is {whole[name]!r}")
        if whole["passed"] and whole["cause"] == UNTOUCHED:  # as earlier versions stored a stub after a pass
            whole["cause"] = ""
        exercises[key] = whole
    predictions = {}
    for key, entry in data["predictions"].items():
        predictions[key] = {"unit": "", "predicted": "", "actual": None, "log_error": None, **entry}
        predictions[key]["value"] = float(entry["value"])
    whole = {"version": VERSION, "exercises": exercises, "predictions": predictions}
    revealed = {key: str(when) for key, when in data.get("revealed", {}).items()}
    return {**whole, "revealed": revealed} if revealed else whole


def main(as_json: bool = False) -> int:
    """`labkit progress`: a table of all exercises. Returns the exit code."""
    from labkit.check import table

    data, warning = load()
    if as_json:
        print(json.dumps(data, indent=1, ensure_ascii=False))
    else:
        told = {key: entry for key, entry in data["exercises"].items() if entry["cause"] != UNTOUCHED}
        print(table.progress_table({**data, "exercises": told}))
    if warning:
        print(f"labkit: {warning}")
    return 0
