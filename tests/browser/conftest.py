"""A browser and a JupyterLab for each test, and screenshots of what a learner saw.

Chromium is the system's, driven over its debugging protocol: no browser is downloaded. Where there is none, these
tests are skipped; in continuous integration (CI=true) they fail. Screenshots are kept in `tests/browser/shots`, or
in the folder that `LABKIT_SHOTS` names: to be looked at, since nobody else sees what is ugly.
"""

import os
import shutil
from pathlib import Path

import pytest

from slides import tools
from tests.browser import lab as labs
from tests.browser import page as pages

FLAGS = "--disable-gpu --disable-quic --no-first-run --disable-sync"
FLAGS += " --disable-background-networking --disable-component-update"
SIZE = {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def chromium():
    """The path of Chromium, the one that `make slides` takes too."""
    path = tools.browser()
    if not path:
        wanted = "waits for Chromium (Debian: apt install chromium; elsewhere: CHROME_PATH=/path/to/it)"
        pytest.fail(wanted) if os.environ.get("CI") else pytest.skip(wanted)
    return path


@pytest.fixture(scope="module")
def driver():
    """Playwright, for as long as this module's tests run: its event loop would be in the way of others'."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def shots():
    """The folder of screenshots."""
    folder = Path(os.environ.get("LABKIT_SHOTS") or labs.ROOT / "tests" / "browser" / "shots")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"\nscreenshots: {folder}")
    return folder


@pytest.fixture
def lab(chromium):
    """A JupyterLab that nobody else uses."""
    with labs.running() as started:
        yield started


@pytest.fixture
def page(lab, driver, chromium, shots, request):
    """An empty page of a browser without a past."""
    from playwright.sync_api import expect

    expect.set_options(timeout=pages.WAIT_S * 1000)
    context = driver.chromium.launch_persistent_context(
        str(lab.folder / "browser"),
        executable_path=chromium,
        args=FLAGS.split(),
        env=labs.environment(lab.folder),  # by which it is known, should it have to be ended
        viewport=SIZE,
    )
    context.set_default_timeout(pages.WAIT_S * 1000)
    yield context.pages[0]
    try:
        if getattr(request.node, "failed", False):
            shutil.copy(lab.folder / "log", shots / f"{begin(request)}.failed.log")
            context.pages[0].screenshot(path=shots / f"{begin(request)}.failed.png", timeout=30_000)
    finally:
        context.close()


@pytest.fixture
def shoot(page, shots, request):
    """shoot("name") keeps a picture of the page."""
    for old in shots.glob(f"{begin(request)}.*"):
        old.unlink()
    return lambda name: page.screenshot(path=shots / f"{begin(request)}.{name}.png")


def begin(request):
    """How the names of a test's screenshots begin."""
    return request.node.name.removeprefix("test_")[:40]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.failed = report.failed or getattr(item, "failed", False)
    return report
