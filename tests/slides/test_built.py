"""The decks as marp-cli builds them: whole pages that load nothing, on which everything fits; and the PDF.

Waits for node, npm, chromium and marp-cli: `make slides` installs the last. Left out: looks, which are for eyes.
"""

import contextlib
import json
import os
import re
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slides import build, tools
from tests.house.source import ROOT

pytestmark = pytest.mark.timeout(600)  # the fixtures draw and build a whole deck
LAYOUT = Path(__file__).with_name("layout.mjs")


@pytest.fixture(scope="module")
def built(deck, drawn, tmp_path_factory):
    """(HTML, PDF) of the deck."""
    lacking = tools.missing() + ["marp-cli in slides/node_modules"] * (tools.installed() != tools.wanted())
    if lacking:  # in continuous integration nothing is let off
        wait = pytest.fail if os.environ.get("CI") else pytest.skip
        wait(f"waits for {', '.join(lacking)}: make slides says how")
    return build.build(deck.path, drawn(deck.lab), tmp_path_factory.mktemp("built"))


class Loads(HTMLParser):
    """Collects what a page would load: addresses in attributes, but for links that are clicked; and its style."""

    def __init__(self):
        super().__init__()
        self.addresses, self.style, self.within = [], [], ""

    def handle_starttag(self, tag, attributes):
        self.within = tag
        for name, value in attributes:
            if name in ("src", "srcset", "poster", "data", "href", "xlink:href") and (tag, name) != ("a", "href"):
                self.addresses.append(value)
            if name == "style":
                self.style.append(value or "")

    def handle_data(self, data):
        if self.within == "style":
            self.style.append(data)


def test_a_page_loads_nothing_from_elsewhere(built):
    page = Loads()
    page.feed(built[0].read_text())
    assert [address[:80] for address in page.addresses if not address.startswith(("data:", "#"))] == []
    style = "".join(page.style)
    assert [url[:80] for url in re.findall(r"url\(['\"]?([^)]*)", style) if not url.startswith(("data:", "#"))] == []
    assert "@import" not in style
    assert "data:font/woff" in style and any(address.startswith("data:image/svg") for address in page.addresses)


@pytest.fixture(scope="module")
def layout(built):
    """What Chromium says of the page: boxes of every slide, fonts, requests."""
    command = ["node", str(LAYOUT), str(built[0]), tools.browser(), str(ROOT / "slides" / "node_modules")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_browser_asks_for_the_page_alone(built, layout):
    assert [Path(url).name for url in layout["asked"] if not url.startswith("blob:")] == [built[0].name]


def test_the_fonts_are_those_in_the_page(layout):
    assert len(layout["fonts"]) == len(build.FACES)
    assert sum(face.endswith(" loaded") for face in layout["fonts"]) == len(build.FACES)


def test_nothing_runs_over_its_slide_or_over_another_thing(deck, layout):
    assert len(layout["slides"]) == len(deck.slides)
    for slide in layout["slides"]:
        parts = [part for part in slide["parts"] if part["tag"] != "footer"]
        parts.sort(key=lambda part: part["top"])
        footer = next(part["top"] for part in slide["parts"] if part["tag"] == "footer")
        assert parts[-1]["bottom"] <= footer, slide["title"]
        assert all(part["over"] == 0 for part in slide["parts"]), slide["title"]
        for upper, lower in zip(parts, parts[1:], strict=False):
            assert upper["bottom"] <= lower["top"] + 0.5, slide["title"]


def test_figures_are_large_and_there(deck, layout):
    for slide, source in zip(layout["slides"], deck.slides, strict=True):
        assert (slide["figure"] is not None) == bool(build.FIGURE.search(source))
        if slide["figure"]:
            assert slide["figure"]["loaded"], slide["title"]
            assert slide["figure"]["height"] >= 300, slide["title"]


def test_type_is_large(layout):
    for slide in layout["slides"]:
        assert min(slide["type"]) >= 17 and sorted(slide["type"])[1] >= 26, slide["title"]


def test_the_pdf_has_a_page_a_slide(deck, built):
    assert len(re.findall(rb"/Type\s*/Page\b(?!s)", inflated(built[1].read_bytes()))) == len(deck.slides)


def inflated(pdf):
    """A PDF with its compressed parts laid open; objects stand in them too."""
    parts = [pdf]
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.S):
        with contextlib.suppress(zlib.error):
            parts.append(zlib.decompressobj().decompress(stream))
    return b"\n".join(parts)


def test_notes_are_in_the_page_for_the_presenter(built):
    assert built[0].read_text().count("Say:") >= 10
