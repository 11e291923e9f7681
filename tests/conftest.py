"""What every test shares: no test reads or writes the learner's own files, none draws on a screen.

`--soak` makes the long drills whole. With several workers (`-n 2`) a file's tests stay together, for they share what
its fixtures made, except where each test is long and shares nothing. (pytest-xdist's own `--dist loadgroup` has no
effect with pytest 9.2, without a word.) Per-room fixtures stand in the room's own conftest, not here.
"""

import gc
import os

import pytest

APART = ("test_editions.py", "test_prove.py")


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="run the long drills whole, not a sample of 40")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """pytest-xdist's scheduler of groups, with ours."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return ByFile(config, log)


def group_of(nodeid):
    """What goes to one worker: a test of APART, the decks (drawn once for all their tests), any other file."""
    file = nodeid.split("::")[0]
    if file.endswith(APART):
        return nodeid
    return "tests/slides" if file.startswith("tests/slides/") else file


@pytest.fixture(scope="session")
def soak(request):
    """True when the long drills are to be run whole (`make soak`)."""
    return request.config.getoption("--soak")


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory):
    """Progress, matplotlib and IPython keep their files in a temporary folder for the length of the run."""
    before = dict(os.environ)
    home = tmp_path_factory.mktemp("home")
    os.environ.update(LABKIT_HOME=str(home / "labkit"), IPYTHONDIR=str(home / "ipython"), MPLBACKEND="Agg")
    yield home
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def apart_from_others():
    """A trace looks at every live model and optimizer: what earlier files left alive is moved out of its sight."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def repo():
    """The repository's root folder, as a Path."""
    from pathlib import Path

    return Path(__file__).resolve().parent.parent
