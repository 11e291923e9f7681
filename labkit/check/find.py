"""Find labs and exercises by their ids, and a learner's function or class by its name.

Labs stand above this room, so they are imported by name, when asked for. Left out: any register of labs; a
lab is a module `labkit.labs.labNN` with a tuple EXERCISES.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import string
import sys
from types import ModuleType
from typing import Any

from labkit.check.exercise import Exercise


def labs() -> list[str]:
    """Numbers of the labs that are installed: ["00", "01"]."""
    import pkgutil

    folder = importlib.import_module("labkit.labs").__path__
    return sorted(m.name[3:] for m in pkgutil.iter_modules(folder) if re.fullmatch(r"lab\d\d", m.name))


def lab(number: str) -> ModuleType:
    """The module of lab "00". Raises ValueError when there is none."""
    name = f"labkit.labs.lab{number}"
    if not re.fullmatch(r"\d\d", number) or importlib.util.find_spec(name) is None:
        raise ValueError(f"there is no lab {number!r}; there is {', '.join(labs())}")
    return importlib.import_module(name)


def exercise(exercise_id: str) -> Exercise:
    """The exercise "0.2", also written "00.2", or "6.1b", second of a pair. ValueError that lists what there is."""
    if not isinstance(exercise_id, str) or not re.fullmatch(r"\s*\d{1,2}\.\d{1,2}[a-z]?\s*", exercise_id, re.ASCII):
        raise ValueError(f'{exercise_id!r} is not the number of an exercise; one looks like "0.2"')
    of_lab = lab(exercise_id.strip().split(".")[0].zfill(2)).EXERCISES
    lab_number, _, number = exercise_id.strip().partition(".")
    digits = number.rstrip(string.ascii_lowercase)
    wanted = f"{int(lab_number)}.{int(digits)}{number[len(digits) :]}"
    for found in of_lab:
        if found.id == wanted:
            return found
    raise ValueError(f"there is no exercise {exercise_id!r}; this lab has {', '.join(e.id for e in of_lab)}")


def function(name: str, depth: int = 1) -> Any:
    """What is called `name` among the globals of the first caller outside labkit, whatever it is; None for nothing."""
    return caller_globals(depth + 1).get(name)


def caller_globals(depth: int = 1) -> dict:
    """Globals of the first frame outside labkit: a notebook's own names."""
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "labkit":
        frame = frame.f_back
    return frame.f_globals
