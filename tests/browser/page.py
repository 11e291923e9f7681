"""Doing in a page of JupyterLab what a learner does: open a notebook, type, run, stop, look.

A cell is meant by its number in the file, which JupyterLab notes in the page. All waiting has a generous end and
asks again until then, so a slow machine makes a test slow and not red.
Left out: shortcuts past the page. What is read from disk was saved by the page first.
"""

import re
import time

from playwright.sync_api import expect

WAIT_S = 120
INDEX = "data-windowed-list-index"
RAN, RUNNING = re.compile(r"^\[\d+\]:$"), "[*]:"
ERROR = '[data-mime-type="application/vnd.jupyter.error"], [data-mime-type="application/vnd.jupyter.stderr"]'


def until(true, what, wait_s=WAIT_S):
    """Ask `true()` until it gives something; AssertionError with `what` when it never does."""
    ends = time.monotonic() + wait_s
    while time.monotonic() < ends:
        found = true()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"not after {wait_s} s: {what}")


def open_notebook(page, lab, name):
    """The notebook in JupyterLab, its kernel idle, all its cells in the page."""
    page.goto(f"{lab.address}/lab/tree/notebooks/{name}?token={lab.token}")
    settle(page, len(lab.read(name)))
    expect(page.get_by_role("button", name="No", exact=True)).to_be_hidden()  # nothing is asked about Jupyter's news


def settle(page, num_cells, state="Idle"):
    """Wait until the page has all cells and its kernel is in that state (cells out of sight come a little later)."""
    expect(page.locator(f".jp-Notebook .jp-Cell[{INDEX}]")).to_have_count(num_cells)
    expect_kernel(page, state)


def expect_kernel(page, state):
    """The status bar says so: "Idle", "Busy|Unknown"."""
    expect(page.locator("#jp-main-statusbar")).to_contain_text(re.compile(rf"\| ({state})"))


def cell(page, number):
    """The cell with this number in the file, scrolled into sight."""
    found = page.locator(f'.jp-Notebook .jp-Cell[{INDEX}="{number}"]')
    found.scroll_into_view_if_needed()
    return found


def prompt(page, number):
    """What stands before a code cell: "[3]:", "[*]:"."""
    return cell(page, number).locator(".jp-InputPrompt")


def run(page, number, wait=True):
    """Click into a cell and press Shift+Enter; wait until it has run. Returns its outputs."""
    cell(page, number).locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    if wait:
        expect_ran(page, number)
    return cell(page, number).locator(".jp-OutputArea-output")


def expect_ran(page, number, wait_s=WAIT_S):
    """The cell has a number and the kernel nothing more to do."""
    expect(prompt(page, number)).to_have_text(RAN, timeout=wait_s * 1000)
    expect_kernel(page, "Idle")


def menu(page, name, entry):
    """Choose an entry of the menu bar."""
    page.get_by_role("menuitem", name=name, exact=True).click()
    page.locator(".lm-Menu-item", has_text=entry).first.click()


def press(page, command):
    """Press the toolbar's button for a command of JupyterLab."""
    page.locator(f'.jp-NotebookPanel-toolbar [data-command="{command}"]').click()


def type_into(page, number, code):
    """Put `code` in place of a cell's, key by key. What the editor indents by itself is typed over."""
    cell(page, number).locator(".cm-content").click()
    page.keyboard.press("ControlOrMeta+A")
    for at, line in enumerate(code.strip("\n").split("\n")):
        if at:
            page.keyboard.press("Enter")
            page.keyboard.press("Shift+Home")
        page.keyboard.type(line)


def save(page, lab, name):
    """Save with the keyboard; the cells as they are on disk then."""
    path = lab.notebooks / name
    before = path.stat().st_mtime_ns
    page.keyboard.press("ControlOrMeta+S")
    until(lambda: path.stat().st_mtime_ns != before, f"{name} is saved")
    expect(page.locator(".jp-Document.jp-mod-dirty, .lm-TabBar-tab.jp-mod-dirty")).to_have_count(0)
    return lab.read(name)


def walk(page, shoot, name):
    """A screenshot of every screenful of the notebook, from the top."""
    panel = page.locator(".jp-NotebookPanel .jp-WindowedPanel-outer")
    step = panel.evaluate("panel => panel.clientHeight - 60")
    for number in range(100):
        top, there = panel.evaluate("(panel, top) => [panel.scrollTop = top, panel.scrollTop]", number * step)
        page.wait_for_timeout(150)
        shoot(f"{name}-{number:02}")
        if there < top:
            return


def picture(image):
    """The bytes of an `img`, as the page has them."""
    read = "async image => Array.from(new Uint8Array(await (await fetch(image.src)).arrayBuffer()))"
    return bytes(image.evaluate(read))


def tab_to(page, target, most=20):
    """Press Tab until the element has the focus, as somebody without a mouse does."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if target.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"{most} times Tab does not reach {target}")
