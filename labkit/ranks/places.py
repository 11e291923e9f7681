"""Places in the reader's code: which frame is theirs, and how "file:line" is said to them.

A place is "filename:lineno" of the innermost frame that is neither torch, the standard library, an installed
package nor labkit (an experiment in labkit/labs counts as the reader's). Used in ranks to note places, in the
notebook to say them ("cell 12, line 3"). IPython is asked only if it is already there. Left out: source text,
which a rank does not have.
"""

import linecache
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache

_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_LABKIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LABS = os.path.join(_LABKIT, "labs") + os.sep
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")


@lru_cache(maxsize=4096)
def is_readers(filename: str) -> bool:
    """True for a file or cell of the reader, False for torch, installed packages, the standard library, labkit."""
    if filename.startswith(_LABS):
        return True
    if filename.startswith(("<frozen", "<__", "<string>", _LABKIT, _STDLIB)):
        return False
    return not _PACKAGES.search(filename)


@lru_cache(maxsize=4096)
def is_torchs(filename: str) -> bool:
    """True for the files that never make a good place: torch, labkit, the standard library."""
    inside = re.search(r"[/\\](site|dist)-packages[/\\](\w+)", filename)
    return not is_readers(filename) and (inside is None or inside[2] == "torch")


def of_frames(frames: Sequence[tuple]) -> str:
    """The place of a stack. Pairs (filename, line) as of a faulthandler dump come innermost first; triples
    (filename, line, function) as of a traceback come outermost first. "" when no frame qualifies."""
    innermost_first = frames if not frames or len(frames[0]) == 2 else frames[::-1]
    for wanted in (is_readers, lambda name: not is_torchs(name)):
        for filename, line, *_ in innermost_first:
            if wanted(filename):
                return f"{filename}:{line}"
    return ""


def readable(place: str) -> str:
    """"cell 12, line 3" or "train.py, line 7" for a raw place; "" for none."""
    if place.startswith("after "):
        return f"after {readable(place[6:])}"
    filename, _, line = place.rpartition(":")
    if not filename or not line.isdigit():
        return place
    cell = cell_number(filename)
    return f"{os.path.basename(filename) if cell is None else f'cell {cell}'}, line {line}"


def cell_number(filename: str) -> int | None:
    """The execution count of the notebook cell compiled under this name; None when it is no cell of this kernel."""
    named = re.match(r"<ipython-input-(\d+)-", filename)  # IPython before ipykernel 6, and the terminal
    if named:
        return int(named[1])
    shell = _shell()
    if shell is None:
        return None
    numbers = getattr(shell.compile, "_filename_map", None)
    if numbers is not None:
        return numbers.get(filename)
    return _search_history(shell, filename)


def _shell():
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


def _search_history(shell, filename: str) -> int | None:
    """IPython 7 keeps no map of names: name each cell of the history again, newest first."""
    history = shell.history_manager
    cells = list(zip(history.input_hist_raw, history.input_hist_parsed, strict=False))
    for number in range(len(cells) - 1, 0, -1):
        raw, parsed = cells[number]
        try:
            if filename in (shell.compile.get_code_name(raw, parsed, number),
                            shell.compile.get_code_name(parsed, parsed, number)):  # fmt: skip
                return number
        except (AttributeError, TypeError):
            return None
    return None


def traceback_text(frames: Iterable[tuple[str, int, str]], only: str) -> str:
    """A short traceback, outermost first: the reader's frames, then the innermost frame wherever it is, then
    the exception as `only` says it."""
    frames = list(frames)
    shown = [frame for frame in frames if is_readers(frame[0])] or frames[-1:]
    if frames and frames[-1] != shown[-1]:
        shown.append(frames[-1])
    lines = []
    for filename, line, name in shown:
        lines.append(f"  {readable(f'{filename}:{line}')}, in {name}")
        source = linecache.getline(filename, line).strip()  # of a cell, too: IPython keeps its source there
        lines += [f"    {source}"] if source else []
    return "\n".join([*lines, only])
