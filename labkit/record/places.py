"""Where in the learner's code something happened, cheaply enough to be asked at every op.

What counts as the learner's code is said in `labkit.ranks.places`. Left out: turning a cell's file name into
"cell 12", which is done there for whoever reads.
"""

from __future__ import annotations

from sys import _getframe  # by name: `watching` puts a telltale in sys meanwhile
from types import CodeType, FrameType

from labkit.ranks.places import is_readers


class Places:
    """Finds the learner's innermost frame, remembering the verdict on each file name."""

    def __init__(self):
        self.readers: dict[str, bool] = {}

    def frame(self, frame: FrameType | None) -> FrameType | None:
        """The learner's innermost frame at or outside `frame`; None where there is none."""
        known = self.readers
        while frame is not None:
            name = frame.f_code.co_filename
            mine = known.get(name)
            if mine is None:
                mine = known[name] = is_readers(name)
            if mine:
                return frame
            frame = frame.f_back
        return None

    def here(self, depth: int = 1) -> tuple[CodeType, int] | None:
        """Code and instruction of the learner's innermost frame: quick to take, put into words by `named`."""
        frame = self.frame(_getframe(depth))
        return None if frame is None else (frame.f_code, frame.f_lasti)


def named(here: tuple[CodeType, int] | None) -> str:
    """The place "filename:line" of what `Places.here` took; "" for None."""
    if here is None:
        return ""
    code, instruction = here
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
            break
    return f"{code.co_filename}:{line}"
