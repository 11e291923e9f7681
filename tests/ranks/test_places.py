"""A place is the reader's own line, said as the reader sees it: a cell and a line, or a file and a line."""

import os
import subprocess
import sys
import sysconfig
import types

import pytest

import labkit
from labkit.ranks import places

LABKIT = os.path.dirname(os.path.abspath(labkit.__file__))
PACKAGES = sysconfig.get_paths()["purelib"]


@pytest.mark.parametrize(
    "filename, is_readers, is_torchs",
    [
        ("/home/me/train.py", True, False),
        ("/tmp/ipykernel_7/123.py", True, False),
        ("<ipython-input-3-abc>", True, False),
        (f"{LABKIT}/labs/lab00.py", True, False),
        (f"{LABKIT}/ranks/rank.py", False, True),
        (f"{PACKAGES}/torch/distributed/distributed_c10d.py", False, True),
        (f"{PACKAGES}/deepspeed/runtime/engine.py", False, False),
        (os.__file__, False, True),
        ("<frozen runpy>", False, True),
        ("<string>", False, True),
    ],
)
def test_files_are_sorted_into_the_readers_and_others(filename, is_readers, is_torchs):
    assert (places.is_readers(filename), places.is_torchs(filename)) == (is_readers, is_torchs)


def test_the_place_of_a_traceback_and_of_a_dump_is_the_innermost_line_of_the_reader():
    torch_file = f"{PACKAGES}/torch/nn/functional.py"
    traceback = [("/me/a.py", 3, "main"), ("/me/b.py", 9, "step"), (torch_file, 100, "linear")]
    assert places.of_frames(traceback) == "/me/b.py:9"
    assert places.of_frames([frame[:2] for frame in traceback[::-1]]) == "/me/b.py:9"
    assert places.of_frames([(torch_file, 100)]) == "" == places.of_frames([])
    engine = f"{PACKAGES}/deepspeed/engine.py"
    assert places.of_frames([(torch_file, 100), (engine, 7)]) == f"{engine}:7"


def test_outside_a_notebook_a_place_is_file_and_line():
    assert places.readable("/home/me/train.py:7") == "train.py, line 7"
    assert places.readable("after /home/me/train.py:7") == "after train.py, line 7"
    assert places.readable("") == ""


def kernel(monkeypatch, compiler, **more):
    shell = types.SimpleNamespace(compile=compiler, **more)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))


def test_a_cell_is_known_by_the_number_that_ipython_8_keeps(monkeypatch):
    kernel(monkeypatch, types.SimpleNamespace(_filename_map={"/tmp/ipykernel_7/123.py": 12}))
    assert places.readable("/tmp/ipykernel_7/123.py:3") == "cell 12, line 3"
    assert places.readable("/home/me/train.py:7") == "train.py, line 7"


def test_a_cell_is_known_by_its_text_under_ipython_7(monkeypatch):
    def get_code_name(raw_code, transformed_code, number):
        return f"/tmp/ipykernel_7/{len(raw_code)}.py"

    history = types.SimpleNamespace(input_hist_raw=["", "a", "bb", "a"], input_hist_parsed=["", "a", "bb", "a"])
    kernel(monkeypatch, types.SimpleNamespace(get_code_name=get_code_name), history_manager=history)
    assert places.readable("/tmp/ipykernel_7/2.py:3") == "cell 2, line 3"
    assert places.readable("/tmp/ipykernel_7/1.py:1") == "cell 3, line 1"
    assert places.readable("/tmp/ipykernel_7/9.py:1") == "9.py, line 1"
    assert places.readable("<ipython-input-5-0123>:2") == "cell 5, line 2"


def test_a_real_shell_numbers_its_cells():
    pytest.importorskip("IPython")
    program = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "for code in ('x = 1', 'def f():\\n    return 2', 'y = f()'): shell.run_cell(code, store_history=True)\n"
        "from labkit.ranks import places\n"
        "code = shell.user_ns['f'].__code__\n"
        "print(places.readable(f'{code.co_filename}:2'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "cell 2, line 2", done.stderr


def test_a_traceback_shows_the_readers_frames_and_the_last():
    text = places.traceback_text(
        [("/me/a.py", 3, "main"), (f"{PACKAGES}/torch/x.py", 1, "inner"), (f"{PACKAGES}/torch/y.py", 2, "deepest")],
        "ValueError: no",
    )
    assert text.splitlines() == ["  a.py, line 3, in main", "  y.py, line 2, in deepest", "ValueError: no"]
    assert places.traceback_text([], "ValueError: no") == "ValueError: no"
