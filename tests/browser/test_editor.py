"""A schedule drawn in JupyterLab: clicks, keys and text change it, the verdict follows, and it runs on ranks.

The cells are lab 07's own, those before exercise 7.5. Left out: every other draft (tests/view/test_editor.py).
"""

import io

import matplotlib.pyplot as plt
import pytest
from playwright.sync_api import expect

from labkit.schedule import grid
from labkit.schedule.classic import one_f_one_b
from labkit.schedule.zero_bubble import zb_v
from labkit.view import draft, editor
from tests.browser import page as pages

pytestmark = pytest.mark.timeout(900)

LAB = "solved/07_pipeline_parallel.ipynb"
BEGINS = ("import matplotlib", "start = draft.read", "print(draft.look")  # of the cells: imports, editor, what it is
SMALLEST = 24  # pixels that a finger needs (WCAG 2.2, 2.5.8)
# Of what can be clicked or typed into: those too small, with letters cut off, or reaching beyond the cell's output.
UNFIT = """(box, smallest) => {
    const edge = box.closest(".jp-OutputArea-output").getBoundingClientRect().right, grid = ".widget-gridbox";
    const seen = [...box.querySelectorAll("button, select, textarea")].filter(one => one.checkVisibility());
    const whole = one => one.tagName === "TEXTAREA" || one.scrollWidth <= one.clientWidth;
    const unfit = one => one.clientWidth < smallest || one.clientHeight < smallest || !whole(one) ||
        (!one.closest(grid) && one.getBoundingClientRect().right > edge);
    return [seen.length, seen.filter(unfit).map(one => one.textContent + one.title)];
}"""
LABELS = "buttons => Object.fromEntries(buttons.map(one => [one.title, one.textContent.trim()]))"


def test_a_schedule_is_drawn_with_clicks_keys_and_text_and_run_on_ranks(lab, page, shoot):
    sources = [one.source for one in lab.read(LAB) if one.cell_type == "code"]
    cells = [next(source for source in sources if source.startswith(begin)) for begin in BEGINS]
    pages.open_notebook(page, lab, lab.write("draw.ipynb", *cells))
    pages.run(page, 0)
    pages.run(page, 1)
    start = draft.settled(draft.read(grid.text(one_f_one_b(4, 4)).replace("1F1B", "mine").replace("B", "I")))
    expect_drawn(page, start, "0W0 is missing: rank 0 never does it, though it has the I (32 of 48 blocks are drawn")
    expect(button(page, "run on ranks")).to_be_disabled()
    expect_fit(page)
    shoot("begun")
    wrong_and_right_again(page, start)
    drawn = all_weights(page, start)
    shoot("valid")
    text_and_grid(page, drawn, shoot)
    expect(pages.run(page, 2)).to_contain_text(draft.look(drawn).sentence)
    page.set_viewport_size({"width": 760, "height": 900})
    pages.until(lambda: unfit(page) == [], "every control is whole in a narrow page")
    box(page).scroll_into_view_if_needed()
    shoot("narrow")


def wrong_and_right_again(page, start):
    """A W before its I, put with keys; a forward that is gone, and put again."""
    button(page, "W").click()
    pages.tab_to(page, cell(page, 3, 0))
    page.keyboard.press("Enter")
    wrong = draft.put(start, 3, 0, "W", 3)
    expect_drawn(page, wrong, "rank 3 stops before 3W0 (action 1): it needs 3F0, which comes later")
    expect(cell(page, 3, 0)).to_be_focused()
    button(page, "erase").click()
    cell(page, 3, 0).click()
    cell(page, 0, 1).click()
    gone = draft.erase(start, 0, 1)
    expect_drawn(page, gone, "rank 1 stops before 1F1 (action 2): it needs 0F1, which is not drawn yet (31 of 48")
    button(page, "F").click()
    cell(page, 0, 1).click()
    expect_drawn(page, start, "0W0 is missing")


def all_weights(page, start):
    """All W at the rows' ends, as fast as clicks come; the grid grows and the focus stays. Then where they are played.
    Returns what is drawn."""
    button(page, "W").click()
    drawn, last = start, len(start.rows[0]) + 4
    for column in range(len(start.rows[0]), last):
        for rank in range(4):
            drawn = draft.put(drawn, rank, column, "W", rank)
            cell(page, rank, column).click()
    expect_drawn(page, drawn, f"valid: idle {draft.look(drawn).idle_share:.1%}, 1F1B 42.9%")
    expect(cell(page, 3, last - 1)).to_be_focused()
    played = draft.settled(drawn)
    assert played != drawn
    button(page, "to played time").click()
    expect_drawn(page, played, draft.look(drawn).sentence)
    return played


def text_and_grid(page, drawn, shoot):
    """The grid follows what is typed, however different it is, and that runs; it stays where nothing can be read."""
    text = box(page).locator("textarea")
    stage = page.get_by_label("stage")
    expect(stage).to_be_hidden()
    other = draft.read(grid.text(zb_v(2, 4)))
    text.fill(other.text)
    page.keyboard.press("Tab")
    expect_drawn(page, other, draft.look(other).sentence)
    stage.select_option("3 (rank 0)")
    button(page, "erase").click()
    column = other.rows[0].index("3W3")
    cell(page, 0, column).click()
    button(page, "W").click()
    cell(page, 0, column).click()
    expect_drawn(page, other, draft.look(other).sentence)
    expect_fit(page)
    shoot("two-stages-a-rank")
    button(page, "run on ranks").click()
    expect(told(page)).to_contain_text("run on 2 ranks, 3 steps: losses within")
    text.fill(other.text.replace("0F1", "0X1"))
    page.keyboard.press("Tab")
    expect(told(page)).to_contain_text("line 2, token 2 ('0X1'): an action is stage, F, B, I or W, and microbatch")
    assert shown(page)[0] == labels(other)
    text.fill(drawn.text)
    page.keyboard.press("Tab")
    expect_drawn(page, drawn, draft.look(drawn).sentence)


def box(page):
    """All of the editor."""
    return page.locator(".labkit-schedule")


def button(page, label):
    return box(page).get_by_role("button", name=label, exact=True)


def cell(page, rank, column):
    """A button of the grid."""
    return box(page).get_by_title(f"rank {rank}, column {column}", exact=True)


def told(page):
    """The verdict."""
    return box(page).locator(".widget-html-content:has(b)")


def labels(drawn):
    """Button -> what is to stand on it."""
    width = max(map(len, drawn.rows)) + editor.SPARE
    found = {}
    for rank, row in enumerate(drawn.rows):
        for column, cell in enumerate((*row, *["."] * (width - len(row)))):
            found[f"rank {rank}, column {column}"] = cell.strip(".-")
    return found


def shown(page):
    """What stands on the grid's buttons, and the text."""
    buttons = box(page).locator(".widget-gridbox button")
    return buttons.evaluate_all(LABELS), box(page).locator("textarea").input_value()


def expect_drawn(page, drawn, sentence):
    """Grid, text, picture and verdict are those of this draft."""
    expect(told(page)).to_contain_text(sentence)
    pages.until(lambda: shown(page) == (labels(drawn), drawn.text), f"the grid of {drawn.text}")
    due = pixels(editor._picture()(drawn, draft.look(drawn)))
    image = box(page).locator(".widget-image")
    pages.until(lambda: same(pixels(pages.picture(image)), due), f"the picture of {drawn.text}")


def pixels(png):
    return plt.imread(io.BytesIO(png))


def same(one, other):
    return one.shape == other.shape and (one == other).all()


def unfit(page):
    count, found = box(page).evaluate(UNFIT, SMALLEST)
    assert count > 40
    return found


def expect_fit(page):
    assert unfit(page) == []
