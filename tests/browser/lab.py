"""A JupyterLab of the test's own, started by the same lines as `make lab`, and what must be gone after it.

`labkit/bootstrap.py` is copied beside copied notebooks, so that the folder it opens is a temporary one; settings,
kernels' sockets and progress lie in that folder too. Left out: the set-up of .venv, which is done by then.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
STARTS_IN_S = 120  # generous: two cores may run the rest of the tests meanwhile


@dataclass(frozen=True)
class Lab:
    """folder: its notebooks, settings and progress. address: http://127.0.0.1:port. token: what opens it."""

    folder: Path
    address: str
    token: str

    @property
    def notebooks(self):
        return self.folder / "notebooks"

    def progress(self):
        """Points by check id, as the progress file has them; {} before the first check."""
        path = self.folder / "home" / "progress.json"
        kept = json.loads(path.read_text())["exercises"] if path.exists() else {}
        return {name: entry["score"] for name, entry in kept.items()}

    def said_by(self, *command):
        """What the `labkit` command prints for this learner."""
        labkit = Path(sys.executable).with_name("labkit")
        return subprocess.check_output([labkit, *command], text=True, env=environment(self.folder), timeout=120)

    def write(self, name, *sources):
        """A notebook of these code cells."""
        cells = [nbformat.v4.new_code_cell(source.strip("\n"), id=f"cell-{at}") for at, source in enumerate(sources)]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
        nbformat.write(notebook, self.notebooks / name)
        return name

    def read(self, name):
        """The cells of a notebook as they are on disk."""
        return nbformat.read(self.notebooks / name, as_version=4).cells


def environment(folder):
    """What the server, its kernels and their ranks see: nothing of the tester's Jupyter, progress or screen."""
    strange = re.compile(r"JUPYTER|JPY_|IPYTHON|PYTEST|MPLBACKEND$|DISPLAY$|WAYLAND_DISPLAY$|LABKIT")
    kept = {name: value for name, value in os.environ.items() if not strange.match(name)}
    own = {"LABKIT_HOME": "home", "IPYTHONDIR": "ipython", "JUPYTER_CONFIG_DIR": "config"}
    own |= {"JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "run", "TMPDIR": "tmp"}
    return kept | {name: str(folder / place) for name, place in own.items()}


@contextmanager
def running():
    """A Lab that runs; afterwards none of its processes does, however the test ended."""
    # Short, and not pytest's: the path of a kernel's socket may have 100 bytes.
    folder = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
    try:
        for place in ("labkit", "tmp"):
            (folder / place).mkdir()
        shutil.copy(ROOT / "labkit" / "bootstrap.py", folder / "labkit")
        shutil.copytree(ROOT / "notebooks", folder / "notebooks")
        yield start(folder)
    finally:
        end(folder)
        shutil.rmtree(folder, ignore_errors=True)


def start(folder):
    """JupyterLab in `folder`, once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(folder / "labkit" / "bootstrap.py"), "start", "--port", str(port)]
    log = folder / "log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment(folder), stdin=subprocess.DEVNULL, stdout=out,
                                  stderr=subprocess.STDOUT, preexec_fn=with_its_parent)  # fmt: skip
    for _ in range(STARTS_IN_S * 10):
        printed = re.search(r"(http://127\.0\.0\.1:\d+)/lab/tree/\S+\?token=(\w+)", log.read_text())
        if printed and answers(port):
            return Lab(folder, printed[1], printed[2])
        assert server.poll() is None, f"JupyterLab did not start:\n{log.read_text()}"
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab does not answer after {STARTS_IN_S} s:\n{log.read_text()}")


def with_its_parent():
    """Runs in the server before it is one: a session of its own, that ends should the tests be killed."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def answers(port):
    """True once a server listens on this port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def processes(folder):
    """Whatever runs for the lab in `folder`: server, kernels, ranks, browser. Known by their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("JUPYTER_CONFIG_DIR") == str(folder / "config"):
                found.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return [process for process in found if process.pid != os.getpid()]


def end(folder):
    """End all processes of the lab: asked to at first, as Ctrl-C does, then killed."""
    for number, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        found = processes(folder)
        for process in found:
            try:
                process.send_signal(number)
            except psutil.Error:
                continue
        psutil.wait_procs(found, timeout=patience_s)
    assert processes(folder) == [], "still there after SIGKILL"


def ranks(folder):
    """Pids of the ranks that live for the lab in `folder`: forked by a fork server, whose command line they keep."""
    forked = {}
    for process in processes(folder):
        try:
            if "labkit.ranks.server" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                forked[process.pid] = process.ppid()
        except psutil.Error:
            continue
    return sorted(pid for pid, parent in forked.items() if parent in forked)
