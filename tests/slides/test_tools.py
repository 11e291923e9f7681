"""What `make slides` needs: on a bare machine it says in one line what is missing, and it installs exactly one marp.

Left out: npm's own work, which takes the network.
"""

import json
import shutil
import subprocess
import sys

import pytest

from slides import tools
from tests.house.source import ROOT

REGISTRY = "https://registry.npmjs.org/"


def executable(folder, name, says=""):
    """A program that prints `says`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A PATH with nothing on it, and a function that puts programs there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROME_PATH", raising=False)
    monkeypatch.setattr(tools, "MAC_BROWSERS", ())
    return lambda name, says="": executable(tmp_path, name, says)


def test_a_bare_machine_is_told_in_one_line_what_is_missing_and_how_to_get_it(machine):
    line = tools.refusal()
    assert line.count("\n") == 0
    assert line.startswith("slides: not found: node 18 or newer, npm, chromium; Debian: ")
    assert "apt install nodejs npm chromium" in line
    assert "slides/built/*.html and *.pdf" in line


def test_only_what_is_missing_is_named(machine):
    machine("node", "v20.20.2")
    machine("npm")
    assert tools.missing() == ["chromium"]
    assert "Debian: apt install chromium (a browser elsewhere: CHROME_PATH=" in tools.refusal()
    machine("google-chrome")
    assert tools.refusal() == ""


@pytest.mark.parametrize("version, enough", [("v16.20.0", False), ("v18.19.0", True), ("v24.1.0", True), ("no", False)])
def test_an_old_node_counts_as_none(machine, version, enough):
    machine("node", version)
    assert ("node" in tools.missing()) != enough


def test_chrome_path_comes_first_and_must_be_there(machine, monkeypatch, tmp_path):
    machine("chromium")
    machine("mine")
    monkeypatch.setenv("CHROME_PATH", str(tmp_path / "mine"))
    assert tools.browser() == str(tmp_path / "mine")
    monkeypatch.setenv("CHROME_PATH", str(tmp_path / "gone"))
    assert tools.missing()[-1] == "chromium"


def test_make_slides_says_what_is_missing_before_it_sets_anything_up(tmp_path):
    """With the tools of make alone on the PATH."""
    for name in ("make", "sh", "python3"):
        (tmp_path / name).symlink_to(sys.executable if name == "python3" else shutil.which(name))
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    make = ["make", "-s", "slides"]
    done = subprocess.run(make, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode != 0 and done.stdout == ""
    assert len(lines) == 1 and "apt install nodejs npm" in lines[0]  # a Mac's browser is found without the PATH


def test_tools_runs_before_the_lab_is_set_up():
    code = f"import runpy; print(sorted(runpy.run_path('{ROOT}/slides/tools.py')))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd="/")
    assert "refusal" in done.stdout, done.stderr


def test_marp_is_one_version_and_the_lock_has_it():
    package = json.loads((ROOT / "slides" / "package.json").read_text())
    lock = json.loads((ROOT / "slides" / "package-lock.json").read_text())["packages"]
    assert list(package["devDependencies"]) == ["@marp-team/marp-cli"]
    assert lock["node_modules/@marp-team/marp-cli"]["version"] == tools.wanted()
    assert lock[""]["devDependencies"] == package["devDependencies"]


def test_everything_that_the_lock_names_has_its_hash_and_no_address_but_the_registrys():
    lock = json.loads((ROOT / "slides" / "package-lock.json").read_text())["packages"]
    for name, package in lock.items():
        if name:
            # Without an address npm asks the registry that it is set to; the hash is the same everywhere.
            assert package.get("resolved", REGISTRY).startswith(REGISTRY), name
            assert package["integrity"].startswith("sha512-"), name


def test_marp_is_installed_once_and_again_when_package_json_wants_another(tmp_path):
    (tmp_path / "package.json").write_text('{"devDependencies": {"@marp-team/marp-cli": "4.5.1"}}')
    assert tools.installed(tmp_path) == "" and tools.wanted(tmp_path) == "4.5.1"
    folder = tmp_path / "node_modules" / "@marp-team" / "marp-cli"
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"version": "4.5.1"}')
    assert tools.installed(tmp_path) == tools.wanted(tmp_path)


def test_a_failed_npm_is_said(machine, monkeypatch, capsys):
    machine("node", "v20.20.2")
    machine("npm")
    machine("chromium")
    monkeypatch.setattr(tools, "installed", lambda: "")
    monkeypatch.setattr(tools, "install", lambda: 1)
    assert tools.main() == 1
    assert "npm ci failed in slides/" in capsys.readouterr().err
