"""The decks as data: one `Deck` a file, with what its tests ask of it."""

import functools
import re
from dataclasses import dataclass

import pytest

from labkit.cost import devices, links, nodes
from slides import build, cells

HARDWARE = sorted({part.name for part in (*links.LINKS, *nodes.NODES, *devices.DEVICES)}, key=len, reverse=True)


@dataclass(frozen=True)
class Deck:
    """A deck's file, its lab's two digits, and its slides as Markdown."""

    path: object
    lab: str
    slides: tuple

    def notes(self, slide):
        """The speaker notes of a slide: its comment that is no directive."""
        return "\n".join(c for c in build.COMMENT.findall(slide) if not re.match(r"<!--\s*_\w+:", c))

    def footer(self, slide):
        """What stands at the foot of a slide, "" for nothing."""
        found = re.search(r'<!-- _footer: "(.*)" -->', slide)
        return found[1] if found else ""

    def shown(self, slide):
        """What the audience reads and a screen reader says, without the footer."""
        return build.COMMENT.sub("", slide)

    def exercises(self):
        """Ids of the exercises that slides set, in order."""
        return re.findall(r"\*\*Exercise (\d+\.\d+[a-z]?)\*\*", "\n".join(map(self.shown, self.slides)))

    def solution(self):
        """The lines of every solution in the notebook's source."""
        text = cells.source_of(self.lab).read_text()
        blocks = re.findall(r"# SOLUTION\n(.*?)# END SOLUTION", text, re.S)
        return [line.strip() for block in blocks for line in block.splitlines()]


def decks():
    """Every deck."""
    found = []
    for path in build.decks():
        _, slides = build.slides_of(path.read_text(encoding="utf-8"))
        found.append(Deck(path, path.name[:2], tuple(slides)))
    return found


@pytest.fixture(scope="session")
def drawn():
    """A function from a lab to its figures, each drawn once for all tests."""
    return functools.cache(build.draw)


def pytest_generate_tests(metafunc):
    """A test that takes `deck` runs on every one."""
    if "deck" in metafunc.fixturenames:
        metafunc.parametrize("deck", decks(), ids=lambda deck: deck.path.stem, scope="module")


@pytest.fixture(scope="session")
def hardware_names():
    """Names of links, nodes and devices, longest first: digits in them are no figures."""
    return HARDWARE
