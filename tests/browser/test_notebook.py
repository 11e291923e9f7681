"""What a learner does in JupyterLab works there: run a lab, answer, be told, move a slider, stop, come back.

A real JupyterLab as `make lab` starts it, a real Chromium, real keys. Left out: other browsers, Colab, VS Code.
"""

import base64
import io
import re

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb
from playwright.sync_api import expect

from labkit.view import explore
from labkit.view.plot import rank_colour
from tests.browser import lab as labs
from tests.browser import page as pages

# Each waits for far longer than it takes, and says itself what it waited for.
pytestmark = pytest.mark.timeout(900)


def number_of(cells, begin):
    """The number of the cell that begins so."""
    return next(number for number, one in enumerate(cells) if one.source.startswith(begin))


def test_a_solved_lab_runs_to_its_end_without_an_error(lab, page, shoot):
    name = "solved/00_ranks.ipynb"
    pages.open_notebook(page, lab, name)
    cells = lab.read(name)
    last = max(number for number, one in enumerate(cells) if one.cell_type == "code")
    pages.menu(page, "Run", "Run All Cells")
    pages.expect_ran(page, last, wait_s=600)
    kept = pages.save(page, lab, name)
    code = [one for one in kept if one.cell_type == "code"]
    assert all(one.execution_count for one in code)
    assert [one.source for one in code for out in one.outputs if out.output_type == "error"] == []
    assert page.locator(pages.ERROR).all_text_contents() == []
    cards = page.locator(".jp-Notebook [role=status][aria-label]").all_text_contents()
    assert len(cards) == 4 and all("passed" in card for card in cards)
    pages.walk(page, shoot, "page")


def test_a_slider_moved_by_keys_redraws_the_picture_of_its_value(lab, page, shoot):
    name = lab.write("explore.ipynb", "from labkit.view import explore\nexplore.collectives()")
    pages.open_notebook(page, lab, name)
    pages.run(page, 0)
    expect_drawn(page, size="1 MiB", per_node="4", nodes="1")
    shoot("before")
    before = pages.picture(page.locator(".widget-image"))
    page.get_by_label("collective").focus()
    handles = page.locator(".widget-slider [role=slider]")
    pages.tab_to(page, handles.nth(0))
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
    pages.tab_to(page, handles.nth(2))
    page.keyboard.press("ArrowRight")
    expect_drawn(page, size="4 MiB", per_node="4", nodes="2")
    shoot("after")
    assert pages.picture(page.locator(".widget-image")) != before
    page.set_viewport_size({"width": 900, "height": 900})  # half a screen
    pages.until(lambda: cut_off(page) == [], "every control is whole in a narrow page")
    shoot("narrow")


def cut_off(page):
    """Labels of controls that reach beyond the cell's output."""
    edge = page.locator(".jp-OutputArea-output").bounding_box()
    controls = page.locator(".widget-gridbox > *")
    boxes = [(one.inner_text(), one.bounding_box()) for one in controls.all()]
    assert len(boxes) == len(explore.collectives().controls)
    return [label for label, box in boxes if box["x"] + box["width"] > edge["x"] + edge["width"]]


def expect_drawn(page, size, per_node, nodes):
    """Beside the sliders stand these values, and the picture is the one that formulas give for them."""
    readouts = page.locator(".widget-slider .widget-readout")
    expect(readouts).to_have_text([size, per_node, nodes])
    sizes = {explore.curves.as_size(number): number for number in explore.SIZES}
    due = explore.collectives(size=sizes[size], per_node=int(per_node), nodes=int(nodes))
    wanted = pixels(bytes(due.image.value))
    image = page.locator(".widget-image")
    pages.until(lambda: (pixels(pages.picture(image)) == wanted).all(), f"the picture of {size}, {per_node}, {nodes}")


def pixels(png):
    return plt.imread(io.BytesIO(png))


STAR = """
def broadcast(tensor, root):
    if dist.get_rank() == root:
        for other in range(dist.get_world_size()):
            if other != root:
                dist.send(tensor, dst=other)
    else:
        dist.recv(tensor, src=root)
    return tensor
"""


def test_a_wrong_answer_is_told_its_cause_and_the_right_one_its_points(lab, page, shoot):
    name = "00_ranks.ipynb"
    pages.open_notebook(page, lab, name)
    cells, solved = lab.read(name), lab.read("solved/00_ranks.ipynb")
    answer, check = number_of(cells, "def broadcast("), number_of(cells, 'labkit.check("0.2")')
    for number in (number_of(cells, "# Installs labkit"), number_of(cells, "import os")):
        pages.run(page, number)
    card = pages.run(page, check).locator("[role=status]")
    expect(card).to_contain_text("there is no function broadcast yet")
    shoot("no-answer")
    pages.type_into(page, answer, STAR)
    pages.run(page, answer)
    pages.run(page, check)
    expect(card).to_contain_text("0.2 Broadcast from send and recv: not yet, 0 of 3 points")
    expect(card).to_contain_text("rounds")
    shoot("star")
    assert lab.progress() == {"0.2": 0}
    pages.type_into(page, answer, solved[number_of(solved, "def broadcast(")].source)
    pages.run(page, answer)
    pages.run(page, check)
    expect(card).to_contain_text("passed, 3 of 3 points")
    shoot("right")
    assert lab.progress() == {"0.2": 3}
    assert pages.save(page, lab, name)[answer].source == solved[number_of(solved, "def broadcast(")].source


TRAIN = """
import os, time, labkit, torch.distributed as dist
from labkit.view import live

def train():
    for number in range(250):
        labkit.report(step=8 * number, loss=3 / (3 + number) + 0.3 * dist.get_rank())
        time.sleep(0.2)
        if os.path.exists("enough"):
            return

with live.losses(reference=[3 / (3 + step / 8) + 0.15 for step in range(2000)]) as watch:
    labkit.launch(train, 2, on_report=watch)
"""


def test_a_live_curve_grows_while_its_cell_runs(lab, page, shoot):
    name = lab.write("live.ipynb", TRAIN)
    pages.open_notebook(page, lab, name)
    pages.run(page, 0, wait=False)
    seen, reaches = [""], []

    def grown():
        """True once the curve has been longer four times than before, all seen while the cell was at work."""
        state, source = page.evaluate(
            "() => ['.jp-CodeCell .jp-InputPrompt', '.jp-OutputArea-output img']"
            ".map(one => document.querySelector(one)).map(one => one && (one.src || one.textContent))"
        )
        assert state == pages.RUNNING
        if source and source != seen[-1]:
            seen.append(source)
            reaches.append(reach(source))
        return len(set(reaches)) > 4

    pages.until(grown, "the curve grows")
    shoot("running")
    (lab.notebooks / "enough").touch()
    pages.expect_ran(page, 0)
    shoot("done")
    reaches.append(reach(page.locator(".jp-OutputArea-output img").get_attribute("src")))
    assert reaches == sorted(reaches)


def reach(source):
    """How far to the right the picture of a data URL has the colour of rank 0's curve, in pixels.

    Looked at is its lower half: the legend stands in the upper one.
    """
    image = pixels(base64.b64decode(source.split(",")[1]))
    near = abs(image[image.shape[0] // 2 :, :, :3] - to_rgb(rank_colour(0))).max(axis=2) < 0.1
    return int(max(near.any(axis=0).nonzero()[0], default=0))


HANG = """
import os, labkit, torch, torch.distributed as dist

def stuck():
    print("pid", os.getpid(), flush=True)
    while dist.get_rank() == 1:
        pass
    dist.all_reduce(torch.ones(1 << 20))

labkit.launch(stuck, 4, deadline_s=3000)
"""

FOUR_PIDS = re.compile(r"(\[rank \d\] pid \d+\s+){4}")


def hang(lab, page, number):
    """Run the cell that is HANG until its four ranks do."""
    pages.run(page, number, wait=False)
    expect(pages.cell(page, number).locator(".jp-OutputArea-output").first).to_have_text(FOUR_PIDS)
    assert len(labs.ranks(lab.folder)) == 4


def expect_no_ranks(lab):
    pages.until(lambda: labs.ranks(lab.folder) == [], "no rank is left")


def test_the_stop_button_gives_the_notebook_back_and_leaves_no_rank(lab, page, shoot):
    name = lab.write("hang.ipynb", HANG, "print(labkit.launch(dist.get_rank, 2))")
    pages.open_notebook(page, lab, name)
    hang(lab, page, 0)
    pages.press(page, "notebook:interrupt-kernel")
    pages.expect_ran(page, 0)
    expect(pages.cell(page, 0)).to_contain_text("stopped; the ranks were ended")
    expect(pages.cell(page, 0)).to_contain_text("rank 1: running (cell 1, line")
    shoot("stopped")
    expect_no_ranks(lab)
    expect(pages.run(page, 1)).to_have_text(["[0, 1]\n"])


def test_answers_and_points_outlive_a_reload_in_mid_run_and_a_killed_kernel(lab, page, shoot):
    solved = lab.read("solved/00_ranks.ipynb")
    right = solved[number_of(solved, "def rows_of_rank(")].source
    name = lab.write("mine.ipynb", "import labkit", "...", 'labkit.check("0.1")', HANG)
    pages.open_notebook(page, lab, name)
    pages.run(page, 0)
    pages.type_into(page, 1, right)
    pages.run(page, 1)
    expect(pages.run(page, 2)).to_contain_text(["passed, 1 of 1 points"])
    hang(lab, page, 3)
    pages.save(page, lab, name)

    page.reload()
    # A busy kernel cannot tell the new page that it is busy.
    pages.settle(page, len(lab.read(name)), "Busy|Unknown")
    expect(pages.cell(page, 1).locator(".cm-content")).to_contain_text("return range(start")
    expect(pages.cell(page, 2)).to_contain_text("passed, 1 of 1 points")
    shoot("reloaded")
    pages.press(page, "notebook:interrupt-kernel")
    pages.expect_kernel(page, "Idle")
    expect_no_ranks(lab)
    expect(pages.run(page, 2)).to_contain_text(["passed, 1 of 1 points"])

    hang(lab, page, 3)
    pages.menu(page, "Kernel", "Shut Down Kernel")
    expect(page.locator(".jp-NotebookPanel-toolbar")).to_contain_text("No Kernel")
    expect_no_ranks(lab)
    shoot("no-kernel")
    assert lab.progress() == {"0.1": 1} and lab.read(name)[1].source == right

    pages.press(page, "notebook:restart-kernel")
    pages.expect_kernel(page, "Idle")
    pages.run(page, 0)
    expect(pages.run(page, 2).first).to_contain_text("passed before; your 1 point stays")
    shoot("new-kernel")
    pages.run(page, 1)
    expect(pages.run(page, 2)).to_contain_text(["passed, 1 of 1 points"])
    assert "0.1" in lab.said_by("progress")
