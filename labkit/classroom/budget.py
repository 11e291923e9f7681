"""Is a lab within its budget? Cells and their lengths, so that a lab stays a lesson of 45 minutes.

Left out: how long it takes to run; that is measured where it is run.
"""

from __future__ import annotations

from statistics import median

CELLS = (40, 60)
CODE_MEDIAN, CODE_MOST = (3, 5), 25
TEXT_MEDIAN, TEXT_MOST = (15, 45), 150


def over_budget(notebook: dict) -> list[str]:
    """What is not within the budget, a line each; [] when all is. `notebook`: a notebook as read from JSON.

    Budget: 40 to 60 cells; code: median 3 to 5 lines, none over 25; text: median about 30 words (15 to 45),
    none over 150. Lines that are empty or only a comment, and words of links' addresses, are not counted.
    """
    cells = [(cell["cell_type"], cell["id"], "".join(cell["source"])) for cell in notebook["cells"]]
    lines = {name: code_lines(text) for kind, name, text in cells if kind == "code"}
    words = {name: text_words(text) for kind, name, text in cells if kind == "markdown"}
    found = [] if CELLS[0] <= len(cells) <= CELLS[1] else [f"{len(cells)} cells; {CELLS[0]} to {CELLS[1]}"]
    found += _lengths("code", "lines", lines, CODE_MEDIAN, CODE_MOST)
    return found + _lengths("text", "words", words, TEXT_MEDIAN, TEXT_MOST)


def code_lines(text: str) -> int:
    """Lines of code in a cell."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def text_words(text: str) -> int:
    """Words in a text cell that are read as words."""
    return sum(1 for word in text.split() if any(c.isalnum() for c in word) and "://" not in word)


def _lengths(kind: str, unit: str, lengths: dict[str, int], middle: tuple[int, int], most: int) -> list[str]:
    found = [f"{kind} cell {name}: {n} {unit}; at most {most}" for name, n in lengths.items() if n > most]
    typical = median(lengths.values()) if lengths else 0
    if not middle[0] <= typical <= middle[1]:
        found.append(f"{kind} cells: median {typical:g} {unit}; {middle[0]} to {middle[1]}")
    return found
