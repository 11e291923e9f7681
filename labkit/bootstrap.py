"""What `make` does before labkit is there: checks, the virtual environment, and the start of JupyterLab.

Run by whatever `python3` there is, with the standard library only, and written so that even a Python that is
far too old reads this file and says so in one line. It stands outside the rooms: nothing imports it, and it
imports none.
Left out: system packages. Everything else that the lab needs comes from requirements.lock.
"""

from __future__ import print_function

import argparse
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys

OLDEST, NEWEST = (3, 10), (3, 13)
NEEDED_BYTES = 3 * 10**9  # the CPU build of torch and all the rest take 2.1 GB, and pip unpacks beside that
LONGEST_SOCKET_PATH = 100  # bytes; Linux allows 107, macOS 103
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Refusal(Exception):
    """What is missing, in one line that says what to do about it."""


def version_of(python):
    """(major, minor) of an interpreter, or None where there is none or it does not start."""
    code = "import sys; print('%d %d' % sys.version_info[:2])"
    try:
        words = subprocess.check_output([python, "-c", code], stderr=subprocess.PIPE).split()
        return int(words[0]), int(words[1])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None


def choose_python(explicit, here=sys.executable):
    """The interpreter for .venv: the `explicit` one, or the one that runs this, or one found on the PATH.

    Raises Refusal when that one is not Python 3.10-3.13, or none is found.
    """
    wanted = "%d.%d-%d.%d" % (OLDEST + NEWEST)
    if explicit:
        version = version_of(explicit)
        if version is None:
            raise Refusal("PYTHON=%s does not start; give the path of a Python %s" % (explicit, wanted))
        if not OLDEST <= version <= NEWEST:
            raise Refusal("PYTHON=%s is Python %d.%d; the lab needs %s" % ((explicit,) + version + (wanted,)))
        return explicit
    for python in [here] + ["python3.%d" % minor for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]:
        if OLDEST <= (version_of(python) or (0, 0)) <= NEWEST:
            return python
    raise Refusal(
        "python3 is Python %d.%d and no other was found; the lab needs Python %s: install one, "
        "then `make lab PYTHON=/path/to/it`" % (version_of(here) + (wanted,))
    )


def check_venv_module(python):
    """Raises Refusal where Python lacks what makes a virtual environment (Debian splits it off)."""
    if subprocess.call([python, "-c", "import ensurepip, venv"], stderr=subprocess.PIPE) != 0:
        raise Refusal(
            "%s has no venv module: install it (Debian, Ubuntu: apt install python%d.%d-venv) "
            "or name another with PYTHON=" % ((python,) + version_of(python))
        )


def check_space(folder):
    """Raises Refusal when the disk that `folder` is on cannot hold the environment."""
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        sizes = (NEEDED_BYTES / 1e9, folder, free / 1e9)
        raise Refusal("the environment needs %.0f GB of disk; %s has %.1f GB free" % sizes)


def is_free(port):
    """True when a server could listen on this port of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def check_port(text):
    """The port as a number. Raises Refusal when it is none, or taken; the message then names a free one."""
    if not re.match(r"\d+$", text) or not 0 < int(text) < 65536:
        raise Refusal("PORT=%s is not a port; a port is a number from 1 to 65535" % text)
    port = int(text)
    if not is_free(port):
        others = [other for other in range(port + 1, min(port + 100, 65536)) if is_free(other)]
        hint = ": `make lab PORT=%d` takes another" % others[0] if others else ""
        raise Refusal("port %d of 127.0.0.1 is taken, or not yours to take%s" % (port, hint))
    return port


def stamp(root, version):
    """What .venv was made for: its place and its Python (a change means a new one), and what is in it."""
    digest = hashlib.sha256()
    for name in ("requirements.lock", "pyproject.toml"):
        with open(os.path.join(root, name), "rb") as file:
            digest.update(file.read())
    return ["place %s" % os.path.realpath(root), "python %d.%d" % version, "content %s" % digest.hexdigest()]


def set_up(root, explicit):
    """Make .venv what requirements.lock and pyproject.toml say, if it is not yet. Returns its bin folder.

    One set-up at a time: a second `make` in the same folder waits for the first.
    """
    # Opened for writing, which nobody does: NFS locks no file that is open for reading only.
    with open(os.path.join(root, "requirements.lock"), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make sets up .venv here; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        return set_up_alone(root, explicit)


def set_up_alone(root, explicit):
    venv, mark = os.path.join(root, ".venv"), os.path.join(root, ".venv", "labkit.stamp")
    bin_folder = os.path.join(venv, "bin")
    own_python = os.path.join(bin_folder, "python")
    old, own_version = read_lines(mark), version_of(own_python)
    if not explicit and old and own_version and old == stamp(root, own_version):
        return bin_folder
    python = choose_python(explicit)
    version = version_of(python)
    new = stamp(root, version)
    if old == new and own_version:
        return bin_folder
    check_venv_module(python)
    check_space(root)
    if (old and old[:2] != new[:2]) or own_version != version or not has_pip(own_python):
        say("1/4 virtual environment .venv, Python %d.%d" % version)
        run([python, "-m", "venv", "--clear", venv])
    install(root, own_python)
    with open(mark, "w") as file:
        file.write("\n".join(new) + "\n")
    return bin_folder


def install(root, python):
    """Install in an order that matters: torch alone, the rest of the lock (DeepSpeed asks torch), labkit."""
    pip = [python, "-I", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    lock = os.path.join(root, "requirements.lock")
    torch = [line for line in read_lines(lock) if line.startswith("torch==")][0]
    say("2/4 %s first and alone" % torch)
    if sys.platform == "linux" and not os.path.exists("/dev/nvidiactl"):
        say("    no NVIDIA GPU here; where pip takes torch's CUDA build all the same (3 GB), stop and set")
        say("    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu")
    run(pip + [torch])
    say("3/4 the rest of requirements.lock (DeepSpeed is built from source, without compiling its kernels)")
    run(pip + ["--no-build-isolation", "-r", lock])
    say("4/4 labkit")
    run(pip + ["--no-build-isolation", "--no-deps", "-e", root])


def has_pip(python):
    """False for the virtual environment that an interrupted set-up left half made."""
    try:
        subprocess.check_output([python, "-m", "pip", "--version"], stderr=subprocess.PIPE)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def run(command):
    """Run one step in plain sight. Raises Refusal when it fails; what is done stays done."""
    environment = dict(os.environ, PIP_USER="0", PIP_REQUIRE_VIRTUALENV="0")
    code = subprocess.call(command, env=environment)
    if code != 0:
        step = " ".join(command[:1] + [word for word in command[1:] if not word.startswith("-")])
        raise Refusal("`%s` failed, exit code %d; the reason stands above" % (step, code))


def read_lines(path):
    """The lines of a text file; none where there is no file."""
    if not os.path.exists(path):
        return []
    with open(path) as file:
        return file.read().splitlines()


def say(text):
    print("labkit: " + text)
    sys.stdout.flush()


def transport():
    """How JupyterLab talks to kernels: "ipc", sockets that only their owner can open, or "tcp".

    Over TCP, whoever shares the machine can listen (ipykernel 7 warns of it), so that is only for where the
    sockets' path would be too long.
    """
    from jupyter_core.paths import jupyter_runtime_dir

    longest = os.path.join(jupyter_runtime_dir(), "kernel-%s-ipc-5" % ("0" * 36))
    return "ipc" if len(os.fsencode(longest)) <= LONGEST_SOCKET_PATH else "tcp"


def lab_command(python, port, page, kernels):
    """The command that is JupyterLab on loopback. A browser opens where there is a screen."""
    command = [python, "-m", "jupyterlab", "--Application.log_level=WARN"]
    command += ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=%d" % port, "--ServerApp.port_retries=0"]
    command += ["--ServerApp.root_dir=" + ROOT, "--LabApp.default_url=" + page]
    command += ["--KernelManager.transport=" + kernels]
    if os.geteuid() == 0:
        command.append("--allow-root")
    if sys.platform != "darwin" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        command.append("--no-browser")
    return command


def ask_no_questions(prefix):
    """JupyterLab's own defaults for this environment: it asks nothing about news, and looks for nothing on the net."""
    folder = os.path.join(prefix, "share", "jupyter", "lab", "settings")
    path = os.path.join(folder, "overrides.json")
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        with open(path, "w") as file:
            quiet = {"fetchNews": "false", "checkForUpdates": False}
            json.dump({"@jupyterlab/apputils-extension:notification": quiet}, file)


def start_lab(port):
    """Become JupyterLab, with a fresh token, at the first notebook. Runs on .venv's Python."""
    import secrets

    ask_no_questions(sys.prefix)
    token = secrets.token_hex(24)
    notebooks = sorted(glob.glob(os.path.join(ROOT, "notebooks", "*.ipynb")))
    page = "/lab/tree/notebooks/" + os.path.basename(notebooks[0]) if notebooks else "/lab"
    kernels = transport()
    if kernels == "tcp":
        say("kernels talk over TCP on loopback: the path of Jupyter's runtime folder is too long for sockets")
    # The token travels in the environment: a command line can be read by everyone on a shared machine.
    os.environ["JUPYTER_TOKEN"] = token
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", os.defpath)
    say("JupyterLab starts; Ctrl-C twice stops it. Open:")
    say("http://127.0.0.1:%d%s?token=%s" % (port, page, token))
    os.execv(sys.executable, lab_command(sys.executable, port, page, kernels))


def main(arguments):
    """`setup`: the environment. `lab`: that, missing learner editions, JupyterLab. Returns an exit code."""
    parser = argparse.ArgumentParser(prog="bootstrap.py", description=main.__doc__)
    parser.add_argument("what", choices=["setup", "lab", "start"])
    parser.add_argument("--python", default="", help="the interpreter to make .venv with")
    parser.add_argument("--port", default="8888")
    args = parser.parse_args(arguments)
    try:
        if args.python:
            choose_python(args.python)
        port = None if args.what == "setup" else check_port(args.port)
        if args.what == "start":
            start_lab(port)
        bin_folder = set_up(ROOT, args.python)
        if args.what == "lab":
            run([os.path.join(bin_folder, "labkit"), "build", "--missing"])
            python = os.path.join(bin_folder, "python")
            os.execv(python, [python, os.path.abspath(__file__), "start", "--port", args.port])
    except Refusal as refusal:
        sys.stderr.write("labkit: %s\n" % refusal)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
