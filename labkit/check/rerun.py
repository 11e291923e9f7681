"""The same judge in a process that never ran the notebook: what a grade rests on.

The answer arrives as bytes and is opened in ranks only, and what ranks send back is opened with care
(`labkit.ranks.receiving`), so nothing of the answer's runs in the process that judges. The verdict comes by a file
without a name that was opened before and that no rank is given. The ranks are still processes of the same user: to
keep an answer away from files, networks and the memory of the judging process, run this in a sandbox.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

from labkit.check import card, check, find, sealed
from labkit.check.exercise import Exercise, Verdict

_BOOT = "import sys; sys.path[:] = {path!r}; from labkit.check import rerun; rerun.answer({exercise!r}, {seed!r}, {fd})"


def rerun(exercise: Exercise, fn: Callable, seed: int | None = None, deadline_s: float = 300.0) -> Verdict:
    """The verdict of a fresh interpreter on `fn`. Takes some seconds, for torch is imported anew.

    Raises RuntimeError with the process's own words when it gave no verdict (or more than one),
    subprocess.TimeoutExpired when it did not end in time, LaunchError when `fn` cannot be sent.
    """
    payload = sealed.seal(fn).payload
    with tempfile.TemporaryFile() as verdicts:
        fd = verdicts.fileno()
        boot = _BOOT.format(path=sys.path, exercise=exercise.id, seed=seed, fd=fd)
        command = [sys.executable, "-c", boot]
        done = subprocess.run(command, input=payload, capture_output=True, timeout=deadline_s, pass_fds=(fd,))
        verdicts.seek(0)
        lines = verdicts.read().decode(errors="replace").splitlines()
    if done.returncode or len(lines) != 1:
        raise RuntimeError(f"no verdict on {exercise.id}: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    return card.from_json(lines[0])


def answer(exercise_id: str, seed: int | None, fd: int) -> None:
    """In the fresh interpreter: the payload on stdin, the verdict as a line into descriptor `fd`."""
    os.set_inheritable(fd, False)  # what is started from here on does not have it
    exercise = find.exercise(exercise_id)
    payload = sealed.Sealed(sys.stdin.buffer.read(), exercise.name)
    verdict = check.verdict_on(exercise, payload, sealed.fresh_seed() if seed is None else seed)
    with open(fd, "w") as verdicts:
        verdicts.write(card.to_json(verdict) + "\n")
