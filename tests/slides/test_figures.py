"""Figures and numbers: drawn, filled in, large enough, and the same to the byte in another process.

Left out: what marp-cli makes of them (`test_built`).
"""

import hashlib
import json
import os
import random
import re
import subprocess
import sys

import pytest

from slides import build
from slides.drawing import ROOM_PX, SMALLEST_PX, pixels_a_point, svg
from tests.house.source import ROOT

pytestmark = pytest.mark.timeout(600)  # one fixture draws a whole deck on real ranks


@pytest.fixture(scope="module")
def drawings(deck, drawn):
    """Every figure of the deck, drawn once."""
    return drawn(deck.lab)


def hashes(lab, drawings):
    """{figure: hash of its SVG and of its numbers}."""
    found = {}
    for name, drawing in drawings.items():
        text = svg(drawing, f"{lab}_{name}") + repr(sorted(drawing.numbers.items())).encode()
        found[name] = hashlib.sha256(text).hexdigest()
    return found


def test_every_number_of_a_slide_is_given_by_its_figure(deck, drawings):
    for slide in deck.slides:
        assert build.PLACE.findall(build.filled(deck.lab, slide, drawings)) == []


def test_every_number_that_a_figure_gives_is_said(deck, drawings):
    for slide in deck.slides:
        for _, name in build.FIGURE.findall(slide):
            assert set(drawings[name].numbers) <= set(build.PLACE.findall(slide)), name


def test_numbers_are_short_enough_to_be_read(deck, drawings):
    for drawing in drawings.values():
        for name, number in drawing.numbers.items():
            digits = re.findall(r"\d[\d.]*", number.replace(",", ""))
            assert name == "said" or all(len(each.replace(".", "")) <= 4 for each in digits), (name, number)


@pytest.fixture(scope="module")
def chosen():
    """The deck that is drawn twice where not all of them are."""
    return random.choice(build.decks())


def test_figures_do_not_change_from_one_build_to_the_next(deck, drawings, chosen, soak):
    """In a fresh process, with another seed for the order of sets, and on ranks that were started anew."""
    if not soak and deck.path != chosen:
        pytest.skip(f"{chosen.name} is the one drawn twice this time; all of them are with --soak")
    code = "import sys, json; from tests.slides.test_figures import again; print(json.dumps(again(sys.argv[1])))"
    environ = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code, deck.lab], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == hashes(deck.lab, drawings)


def test_a_figure_is_the_same_as_often_as_it_is_asked(deck, drawings):
    assert hashes(deck.lab, drawings) == hashes(deck.lab, drawings)


def again(lab):
    """The hashes of a lab's figures, drawn here."""
    return hashes(lab, build.draw(lab))


def test_letters_in_figures_can_be_read_from_the_last_row(deck, drawings):
    from matplotlib.text import Text

    for name, drawing in drawings.items():
        svg(drawing, name)
        scale = pixels_a_point(drawing.figure)
        sizes = [t.get_fontsize() * scale for t in drawing.figure.findobj(Text) if t.get_text() and t.get_visible()]
        assert min(sizes) > SMALLEST_PX - 0.01, name


def test_figures_have_the_shape_of_the_room_that_slides_have(deck, drawings):
    for name, drawing in drawings.items():
        width, height = drawing.figure.get_size_inches()
        assert 0.9 < width / height < 1.6 * ROOM_PX[0] / ROOM_PX[1], (name, width, height)


def test_letters_stay_inside_their_figure(deck, drawings):
    """At the size at which they are shown."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    for name, drawing in drawings.items():
        svg(drawing, name)
        figure = drawing.figure
        renderer, (right, top) = FigureCanvasAgg(figure).get_renderer(), figure.bbox.size
        unseen = out_of_view(figure)
        for text in figure.findobj(Text):
            if text.get_text() and text.get_visible() and text not in unseen:
                box = text.get_window_extent(renderer)
                assert box.x0 > -3 and box.y0 > -3 and box.x1 < right + 3 and box.y1 < top + 3, (name, text.get_text())


def out_of_view(figure):
    """Labels of ticks beyond the ends of their axis, which are not drawn."""
    found = set()
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = axis.get_major_ticks() + axis.get_minor_ticks()
        found |= {tick.label1 for tick in ticks if not low - 1e-9 <= tick.get_loc() <= high + 1e-9}
    return found


def test_a_figure_holds_no_date_and_loads_nothing(deck, drawings):
    for name, drawing in drawings.items():
        text = svg(drawing, name).decode()
        assert "<dc:date>" not in text
        assert re.findall(r'(?:href|src)="(?!#)[^"]*"', text) == []


def test_every_letter_of_a_slide_is_in_the_fonts(deck, drawings):
    from fontTools.ttLib import TTFont
    from matplotlib import get_data_path

    shown = {letter for letter in build.letters(build.markdown(deck.path, drawings)) if letter.isprintable()}
    for name, *_ in build.FACES:
        known = TTFont(f"{get_data_path()}/fonts/ttf/{name}").getBestCmap()
        assert {letter for letter in shown if ord(letter) not in known} == set()


def test_the_stylesheet_holds_its_fonts_and_loads_nothing():
    css = build.stylesheet("abc")
    assert css.count("@font-face") == len(build.FACES)
    assert [url for url in re.findall(r"url\(([^)]*)\)", css) if not url.startswith("data:font/woff;base64,")] == []
    assert "@import" not in css
    assert build.stylesheet("cba") == css
