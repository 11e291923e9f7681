"""The command: every subcommand reaches its room, errors are one line, exit codes are kept."""

import subprocess
import sys
import types

import pytest

import labkit
from labkit import cli


def lab(**functions):
    """A module that stands for a lab; its functions are its own."""
    module = types.ModuleType("labkit.labs.lab99")
    for name, fn in functions.items():
        fn.__module__ = module.__name__
        setattr(module, name, fn)
    return module


def deadlock(world_size=2, text="x"):
    """Both send first.

    More words.
    """
    return f"{world_size} {text!r}"


@pytest.fixture
def lab99(monkeypatch):
    def needs_an_argument(x):
        """Not an experiment."""

    def undocumented():
        return None

    def _private():
        """Not an experiment."""

    module = lab(deadlock=deadlock, needs_an_argument=needs_an_argument, undocumented=undocumented, _private=_private)
    module.borrowed = pytest.raises
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__spec__ = types.SimpleNamespace()
    return module


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"labkit {labkit.__version__}\n"


@pytest.mark.parametrize("words", [[], ["nonsense"], ["build", "--check", "--missing"], ["prove"]])
def test_misuse_is_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2


def test_experiments_are_the_labs_own_documented_functions(lab99):
    assert list(cli.experiments(lab99)) == ["deadlock"]


def test_run_calls_the_experiment_with_python_values(lab99, capsys):
    assert cli.main(["run", "lab99.deadlock", "world_size=3", "text=hello"]) == 0
    assert capsys.readouterr().out == "3 'hello'\n"


@pytest.mark.parametrize(
    "words, message",
    [
        (["lab99.nothing"], "lab99 has no experiment 'nothing'; it has deadlock"),
        (["lab99"], "lab99 has no experiment ''; it has deadlock"),
        (["lab98.x"], "there is no lab 'lab98'; `labkit run` lists the experiments"),
        (["os.system"], "there is no lab 'os'; `labkit run` lists the experiments"),
        (["lab99.deadlock", "3"], "'3' is not of the form NAME=VALUE"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(lab99, words, message, capsys):
    assert cli.main(["run", *words]) == 1
    assert capsys.readouterr() == ("", f"labkit: {message}\n")


def test_the_listing_names_every_experiment_with_its_first_line(capsys):
    assert cli.main(["run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("lab00.deadlock ") and len(line.split()) > 3 for line in lines)


def test_every_listed_experiment_can_be_found():
    for name, line in cli.listing():
        assert cli.find(name).__doc__.strip().startswith(line)


def test_a_missing_package_is_one_line(lab99, capsys):
    def needs_more():
        """Imports what is not there."""
        import no_such_package  # noqa: F401

    needs_more.__module__ = lab99.__name__
    lab99.needs_more = needs_more
    assert cli.main(["run", "lab99.needs_more"]) == 1
    message = "labkit: no_such_package is not installed; `labkit doctor` says what is missing\n"
    assert capsys.readouterr().err == message


def test_an_interrupt_is_exit_code_130(lab99):
    def stop():
        """Stops."""
        raise KeyboardInterrupt

    lab99.stop = stop
    stop.__module__ = lab99.__name__
    assert cli.main(["run", "lab99.stop"]) == 130


def test_a_reader_that_goes_away_is_no_traceback():
    command = f"{sys.executable} -c 'import sys; from labkit import cli; sys.exit(cli.main([\"doctor\"]))' | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_doctor_fails_only_for_a_problem(monkeypatch, capsys):
    from labkit.doctor import environment
    from labkit.doctor.findings import Finding, Report

    for status, code in (("ok", 0), ("note", 0), ("problem", 1)):
        report = Report((Finding("torch", status, "none", "get one"),))
        monkeypatch.setattr(environment, "examine", lambda report=report: report)
        assert cli.main(["doctor"]) == code
    assert "PROBLEM" in capsys.readouterr().out
