"""pyproject's extras, requirements.lock and environment.yml agree, and the wheel holds labkit alone."""

import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.house import relock
from tests.house.source import ROOT

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# What Colab has; pip must find all of it good enough.
COLAB = {
    "torch": "2.11.0",
    "numpy": "2.1.0",
    "matplotlib": "3.10.0",
    "ipywidgets": "7.7.1",
    "cloudpickle": "3.1.0",
}


@pytest.fixture(scope="module")
def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def lock():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def pins(lock, python):
    """{name: version} that holds on one Python, failing when a package has two pins there."""
    found = {}
    for pin in lock:
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert pin.name not in found, f"{pin.name} is pinned twice on Python {python}"
            found[relock.name_of(pin.name)] = re.fullmatch(r"==([\w.]+)", str(pin.specifier))[1]
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_pins_what_pyproject_asks_for(python, lock, pyproject):
    project = pyproject["project"]
    asked = [*project["dependencies"], *(r for e in project["optional-dependencies"].values() for r in e)]
    pinned = pins(lock, python)
    for requirement in map(Requirement, asked):
        assert pinned[relock.name_of(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_is_closed_over_what_is_installed(python, lock):
    """What a locked package of this environment requires is in the lock too."""
    if python != ".".join(map(str, sys.version_info[:2])):
        pytest.skip("another Python's packages are not here to ask")
    pinned = pins(lock, python)
    for name in pinned:
        for requirement in map(Requirement, relock.requirements_of(name)):
            # torch is installed first and alone; PyPI's build for Linux brings CUDA's libraries, one for CPUs does not.
            if name == "torch" and re.match(r"(cuda|nvidia)-|triton$", requirement.name):
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert pinned[relock.name_of(requirement.name)] in requirement.specifier, (name, requirement)


def test_torch_and_deepspeed_are_pinned_in_one_place(lock):
    pinned = pins(lock, "3.11")
    assert {name: pinned[name] for name in relock.PINNED} == relock.PINNED


def test_the_lock_brings_no_torchvision(lock):
    assert not {"torchvision", "torchaudio"} & set(pins(lock, "3.11"))


def test_conda_takes_the_lock_and_every_extra(pyproject):
    text = (ROOT / "environment.yml").read_text()
    pip_lines = re.findall(r"^ {6}- (.+)$", text, re.MULTILINE)
    extras = ",".join(pyproject["project"]["optional-dependencies"])
    assert pip_lines == ["-r requirements.lock", f"-e .[{extras}]"]
    python = re.search(r"^ {2}- python=(\S+)$", text, re.MULTILINE)[1]
    assert python in SpecifierSet(pyproject["project"]["requires-python"])


def test_colab_has_what_labkit_needs(pyproject):
    needs = {r.name: r.specifier for r in map(Requirement, pyproject["project"]["dependencies"])}
    assert set(needs) == set(COLAB)
    assert all(COLAB[name] in needs[name] for name in needs)
    assert all(operator.operator == ">=" for specifier in needs.values() for operator in specifier)


def test_the_repository_has_one_address(pyproject):
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w.-]+", pyproject["tool"]["labkit"]["repository"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, so that no build folder is left in the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "node_modules", "built")
    for name in ("labkit", "tests", "slides", "notebooks/source"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", folder, folder], check=True)
    return zipfile.ZipFile(next(folder.glob("labkit-*.whl")))


def test_the_wheel_holds_labkit_whole_and_nothing_else(wheel):
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {str(path.relative_to(ROOT)) for path in (ROOT / "labkit").rglob("*.py")}


def test_the_wheel_suits_any_supported_python(wheel):
    assert wheel.filename.endswith("-py3-none-any.whl")
    about = [name for name in wheel.namelist() if ".dist-info/" in name]
    inside = {name.split("/", 1)[1]: wheel.read(name).decode() for name in about}
    assert "labkit = labkit.cli:main" in inside["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in inside["METADATA"]
    assert "licenses/LICENSE" in inside


def test_markers_name_exactly_their_pythons():
    for where in (["3.10"], ["3.11"], ["3.12", "3.13"], ["3.10", "3.12"], ["3.10", "3.11", "3.12"]):
        pin = Requirement("a==1" + relock.marker(where, list(PYTHONS)))
        assert [python for python in PYTHONS if pin.marker.evaluate({"python_version": python})] == where
    assert relock.marker(list(PYTHONS), list(PYTHONS)) == ""
