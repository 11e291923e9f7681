"""What `make` does first: refuses in one line what cannot work, and does nothing twice.

Left out: a whole set-up, which takes minutes and the network; `make test` itself is that test.
"""

import ast
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple

import pytest

from labkit import bootstrap
from tests.house.source import ROOT


def make(*arguments):
    """`make ...` in the repository, expected to refuse: its own lines on stderr, without make's."""
    done = subprocess.run(["make", "-s", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stdout == ""
    return [line for line in done.stderr.splitlines() if not line.startswith("make")]


@pytest.fixture
def taken():
    """A port of 127.0.0.1 that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def fake_python(folder, version, imports=True):
    """An executable that says it is Python `version`, and can or cannot import venv."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\ncase "$2" in *version_info*) echo "{version}" ;; *) exit {0 if imports else 1} ;; esac\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("goal", ["lab", "test", "browser", "soak", "bench", "build", "slides"])
@pytest.mark.parametrize("python", ["/no/python", "/bin/false"])
def test_every_goal_refuses_a_python_that_does_not_start(goal, python):
    line = f"labkit: {python} does not start; install Python 3.10-3.13, or give PYTHON=/path/to/it"
    assert make(goal, f"PYTHON={python}") == [line]


def test_make_lab_refuses_a_taken_port_and_names_a_free_one(taken):
    (line,) = make("lab", f"PORT={taken}")
    assert line.startswith(f"labkit: port {taken} of 127.0.0.1 is taken")
    assert "make lab PORT=" in line


@pytest.mark.parametrize("text", ["lab", "0", "65536", "-1", "8888 8889", ""])
def test_a_port_that_is_none_is_refused(text):
    with pytest.raises(bootstrap.Refusal, match="is not a port"):
        bootstrap.check_port(text)


def test_a_free_port_is_taken_as_it_is(taken):
    assert bootstrap.check_port(str(next(p for p in range(taken + 1, 65536) if bootstrap.is_free(p)))) > taken


@pytest.mark.parametrize("version", ["2 7", "3 9", "3 14"])
def test_a_python_of_another_version_is_refused(tmp_path, version):
    python = fake_python(tmp_path, version)
    with pytest.raises(bootstrap.Refusal, match=f"is Python {version.replace(' ', '.')}; the lab needs 3.10-3.13"):
        bootstrap.choose_python(python)


def test_without_a_choice_a_fitting_python_on_the_path_is_found(tmp_path, monkeypatch):
    os.rename(fake_python(tmp_path, "3 12"), tmp_path / "python3.12")
    old = fake_python(tmp_path, "3 8")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert bootstrap.choose_python("", here=old) == "python3.12"
    assert bootstrap.choose_python("", here=sys.executable) == sys.executable


def test_without_any_fitting_python_the_one_found_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(bootstrap.Refusal, match="python3 is Python 3.8 and no other was found"):
        bootstrap.choose_python("", here=fake_python(tmp_path, "3 8"))


def test_a_python_without_venv_is_refused_with_the_package_to_install(tmp_path):
    with pytest.raises(bootstrap.Refusal, match="apt install python3.11-venv"):
        bootstrap.check_venv_module(fake_python(tmp_path, "3 11", imports=False))


def test_a_full_disk_is_refused_before_anything_is_made(tmp_path, monkeypatch, repo_copy):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**10, 9 * 10**9, 10**9))
    with pytest.raises(bootstrap.Refusal, match="needs 3 GB of disk; .* has 1.0 GB free"):
        bootstrap.set_up(str(repo_copy), "")
    assert not (repo_copy / ".venv").exists()


@pytest.fixture
def repo_copy(tmp_path):
    """A folder with what a set-up reads, and no environment."""
    folder = tmp_path / "repo"
    folder.mkdir()
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def steps(monkeypatch):
    """Commands that a set-up would run: noted, and only `python -m venv` done, without pip."""
    noted = []

    def run(command):
        noted.append(command)
        if "venv" in command:
            subprocess.run([command[0], "-m", "venv", "--without-pip", *command[3:]], check=True)

    monkeypatch.setattr(bootstrap, "run", run)
    return noted


def test_torch_goes_in_first_and_alone_and_labkit_last(repo_copy, steps):
    bootstrap.set_up(str(repo_copy), "")
    installs = [command[command.index("install") :] for command in steps if "install" in command]
    assert [install[-1] for install in installs] == [
        "torch==2.13.0",
        str(repo_copy / "requirements.lock"),
        str(repo_copy),
    ]
    assert "--no-deps" in installs[2]


def test_a_second_set_up_does_nothing(repo_copy, steps):
    bin_folder = bootstrap.set_up(str(repo_copy), "")
    steps.clear()
    assert bootstrap.set_up(str(repo_copy), "") == bin_folder
    assert bootstrap.set_up(str(repo_copy), sys.executable) == bin_folder
    assert steps == []


def test_a_new_lock_is_installed_into_the_environment_that_is_there(repo_copy, steps, monkeypatch):
    bootstrap.set_up(str(repo_copy), "")
    monkeypatch.setattr(bootstrap, "has_pip", lambda python: True)
    steps.clear()
    (repo_copy / "requirements.lock").write_text("torch==2.13.0\nnumpy==2.4.6\n")
    bootstrap.set_up(str(repo_copy), "")
    assert [command for command in steps if "venv" in command] == []
    assert len(steps) == 3


def test_a_moved_repository_gets_a_new_environment(repo_copy, steps, monkeypatch):
    bootstrap.set_up(str(repo_copy), "")
    monkeypatch.setattr(bootstrap, "has_pip", lambda python: True)
    steps.clear()
    bootstrap.set_up(str(repo_copy.rename(repo_copy.parent / "moved")), "")
    assert "--clear" in steps[0]


def test_an_interrupted_set_up_is_not_taken_for_done(repo_copy, steps, monkeypatch):
    def break_down(command):
        raise bootstrap.Refusal("interrupted")

    with monkeypatch.context() as patch, pytest.raises(bootstrap.Refusal):
        patch.setattr(bootstrap, "run", break_down)
        bootstrap.set_up(str(repo_copy), "")
    bootstrap.set_up(str(repo_copy), "")
    assert len(steps) == 4


def test_a_second_make_waits_for_the_first(repo_copy, steps, capsys):
    with open(repo_copy / "requirements.lock") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = threading.Thread(target=bootstrap.set_up, args=(str(repo_copy), ""))
        second.start()
        while "waiting for it" not in capsys.readouterr().out:
            assert second.is_alive()
            time.sleep(0.01)
        assert steps == []
    second.join()
    assert len(steps) == 4


def test_a_step_that_fails_is_named(capfd):
    with pytest.raises(bootstrap.Refusal, match="failed, exit code 3"):
        bootstrap.run([sys.executable, "-c", "import sys; sys.exit(3)"])


def test_an_old_python_can_read_the_file_that_refuses_it():
    text = (ROOT / "labkit" / "bootstrap.py").read_text()
    ast.parse(text, feature_version=(3, 4))
    assert not any(isinstance(node, ast.JoinedStr) for node in ast.walk(ast.parse(text)))


def test_jupyterlab_stays_on_loopback_and_its_token_off_the_command_line(monkeypatch, tmp_path):
    became = []
    monkeypatch.setattr(os, "execv", lambda program, command: became.append(command))
    monkeypatch.setattr(os, "environ", {**os.environ, "PATH": "/bin"})
    bootstrap.start_lab(8901)
    (command,) = became
    assert "--ServerApp.ip=127.0.0.1" in command
    assert "--ServerApp.port=8901" in command
    assert "--KernelManager.transport=ipc" in command
    assert not any("token" in word for word in command)
    assert len(os.environ["JUPYTER_TOKEN"]) == 48
    assert ("--allow-root" in command) == (os.geteuid() == 0)


def test_kernels_use_tcp_where_the_path_of_a_socket_would_be_too_long(monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", "/tmp/r")
    assert bootstrap.transport() == "ipc"
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", "/tmp/" + "long/" * 12)
    assert bootstrap.transport() == "tcp"


@pytest.mark.parametrize("screen, browser", [({}, False), ({"DISPLAY": ":0"}, True), ({"WAYLAND_DISPLAY": "w"}, True)])
def test_a_browser_opens_only_where_there_is_a_screen(monkeypatch, screen, browser):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    for name, value in screen.items():
        monkeypatch.setenv(name, value)
    assert ("--no-browser" not in bootstrap.lab_command("python", 8888, "/lab", "ipc")) == browser


def test_jupyterlab_asks_nothing_about_news_and_a_learners_own_choice_stays(tmp_path):
    bootstrap.ask_no_questions(str(tmp_path))
    path = tmp_path / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    (told,) = json.loads(path.read_text()).values()
    assert told == {"fetchNews": "false", "checkForUpdates": False}
    path.write_text("{}")
    bootstrap.ask_no_questions(str(tmp_path))
    assert path.read_text() == "{}"
