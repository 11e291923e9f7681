"""Progress on disk:

nothing is lost to a killed kernel, a broken file, a full or read-only disk, or a second kernel.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from labkit.check import progress, table


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    monkeypatch.setenv("LABKIT_HOME", str(folder))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(progress.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return folder


def stored(home):
    return json.loads((home / "progress.json").read_text())


def test_an_answer_is_stored_before_it_is_judged(home):
    saved = progress.tried("0.2", "def broadcast(): ...", 3)
    entry = stored(home)["exercises"]["0.2"]
    assert saved.warning == "" and saved.path == str(home / "progress.json")
    assert entry["answer"] == {"tried": "def broadcast(): ...", "passed": ""}
    assert (entry["attempts"], entry["passed"], entry["possible"]) == (0, False, 3)  # none before it is judged


def test_a_pass_stays_and_the_best_score_counts(home):
    for source, passed, score, cause in (("a", False, 0, "star"), ("b", True, 3, ""), ("c", False, 0, "chain")):
        progress.tried("0.2", source, 3)
        progress.judged("0.2", source, passed, score, 3, cause)
    entry = stored(home)["exercises"]["0.2"]
    assert (entry["passed"], entry["score"], entry["attempts"], entry["cause"]) == (True, 3, 3, "chain")
    assert entry["answer"] == {"tried": "c", "passed": "b"}
    assert entry["first_passed"] and stored(home)["version"] == 1


def test_a_stub_is_no_attempt_and_leaves_what_real_ones_left(home, capsys):
    def stub():
        progress.tried("0.2", "return NotImplemented", 3)
        progress.judged("0.2", "return NotImplemented", False, 0, 3, "not_attempted")
        return stored(home)["exercises"]["0.2"]

    assert (stub()["attempts"], stub()["cause"]) == (0, "not_attempted")
    progress.main()
    assert "not attempted" in capsys.readouterr().out
    progress.judged("0.2", "a", False, 0, 3, "star")
    assert (stub()["attempts"], stub()["cause"]) == (1, "star")
    progress.judged("0.2", "b", True, 3, 3, "")
    entry = stub()
    assert (entry["attempts"], entry["cause"], entry["passed"], entry["score"]) == (2, "", True, 3)


def test_a_pass_that_was_stored_as_not_attempted_is_mended(home):
    progress.judged("0.2", "b", True, 3, 3, "")
    data = stored(home)
    data["exercises"]["0.2"]["cause"] = "not_attempted"
    (home / "progress.json").write_text(json.dumps(data))
    assert progress.load()[0]["exercises"]["0.2"]["cause"] == ""


def test_an_interrupted_check_is_told_and_is_no_try(home, capsys):
    progress.tried("0.2", "x", 3)
    progress.main()
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("0.2 "))
    assert "interrupted" in line and " 0 " in line


def test_a_broken_file_is_kept_aside_and_told(home):
    home.mkdir()
    for text in ("{", "[]", '{"version": 1}', '{"version": 99, "exercises": {}, "predictions": {}}', "\0", "null",
                 '{"version": 1, "exercises": {"0.1": {"attempts": "many"}}, "predictions": {}}'):  # fmt: skip
        (home / "progress.json").write_text(text)
        data, told = progress.load()
        assert data["exercises"] == {} and "could not be understood" in told
        assert (home / "progress.json").read_text() == text  # only whoever writes puts it aside
        saved = progress.tried("0.1", "x", 1)
        aside = sorted(home.glob("progress.json.broken-*"))
        assert any(path.read_text() == text for path in aside), text
        assert "is kept as" in saved.warning and "0.1" in stored(home)["exercises"]
    assert len(aside) == 7


def test_a_source_of_any_characters_can_be_stored(home):
    source = "def f(): return '한글 \udc80 \0 \\'"
    assert progress.tried("0.1", source, 1).warning == ""
    assert progress.load()[0]["exercises"]["0.1"]["answer"]["tried"] == source
    progress.tried("0.1", "x" * 1_000_000, 1)
    assert len(stored(home)["exercises"]["0.1"]["answer"]["tried"]) == progress.MAX_SOURCE


def test_two_kernels_at_once_lose_nothing(home):
    code = "from labkit.check import progress\nfor i in range(20): progress.judged('0.{}', 'x', False, 0, 1, 'star')"
    kernels = [subprocess.Popen([sys.executable, "-c", code.format(k)]) for k in (1, 2)]
    assert [kernel.wait(60) for kernel in kernels] == [0, 0]
    assert {i: e["attempts"] for i, e in stored(home)["exercises"].items()} == {"0.1": 20, "0.2": 20}
    assert sorted(path.name for path in home.iterdir()) == ["progress.json", "progress.lock"]


def test_threads_of_one_kernel_lose_nothing(home):
    threads = [threading.Thread(target=progress.tried, args=(f"0.{i}", "x", 1)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(stored(home)["exercises"]) == 8


def test_a_kernel_killed_while_it_writes_leaves_a_whole_file(home):
    code = "from labkit.check import progress\nprint(1, flush=True)\nwhile True: progress.tried('0.1', 'x' * 50000, 1)"
    for _ in range(3):
        kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        kernel.stdout.readline()
        for _ in range(200):
            if (home / "progress.json").exists():
                break
            threading.Event().wait(0.01)
        kernel.send_signal(signal.SIGKILL)
        kernel.wait(10)
        kernel.stdout.close()
        data, told = progress.load()
        assert told == "" and len(data["exercises"]["0.1"]["answer"]["tried"]) == 50000
    assert progress.tried("0.1", "y", 1).warning == ""  # the lock died with the kernel


def test_a_stopped_kernel_does_not_hold_up_another_one(home, monkeypatch):
    monkeypatch.setattr(progress, "_LOCK_DEADLINE_S", 0.1)
    progress.tried("0.1", "x", 1)
    with progress._locked(home / "progress.lock"):
        assert progress.tried("0.1", "x", 1).warning == ""


def test_a_home_that_cannot_be_written_is_told_once_per_save_and_replaced(home, tmp_path):
    home.write_text("a file where the folder should be")
    saved = progress.tried("0.1", "x", 1)
    assert saved.path.startswith(str(tmp_path / "tmp"))
    assert saved.warning.count("\n") == 0 and str(home) in saved.warning and "LABKIT_HOME" in saved.warning
    progress.judged("0.1", "x", True, 1, 1, "")
    assert progress.load()[0]["exercises"]["0.1"]["passed"]
    home.unlink()
    progress.tried("0.2", "y", 1)  # home can be written again: what was kept in between moves there
    assert set(stored(home)["exercises"]) == {"0.1", "0.2"}
    assert not progress.spare().exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="/proc stands in for a read-only home, for root too")
def test_a_read_only_home_is_replaced(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", "/proc/labkit")
    saved = progress.tried("0.1", "x", 1)
    assert "/proc/labkit/progress.json cannot be written" in saved.warning
    assert saved.path == str(progress.spare() / "progress.json")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_file_and_the_new_result(home, monkeypatch, failing):
    progress.tried("0.1", "old", 1)
    real = getattr(os, failing)

    def full(first, *rest):
        path = os.readlink(f"/proc/self/fd/{first}") if failing == "fsync" else str(first)
        if path.startswith(str(home)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(first, *rest)

    monkeypatch.setattr(progress.os, failing, full)
    saved = progress.tried("0.1", "new", 1)
    assert "No space left" in saved.warning
    assert stored(home)["exercises"]["0.1"]["answer"]["tried"] == "old"
    assert progress.load()[0]["exercises"]["0.1"]["answer"]["tried"] == "new"
    assert [path.name for path in home.iterdir() if path.name.startswith(".")] == []


def test_a_file_size_limit_of_the_process_is_survived(home):
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "import tempfile; tempfile.gettempdir = lambda: '/nonexistent'\n"
        "from labkit.check import progress\nsaved = progress.judged('0.1', 'x', True, 1, 1, '')\n"
        "assert saved.data['exercises']['0.1']['passed'] and saved.path == '', saved\nprint(saved.warning)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout and "is not stored" in done.stdout and done.stdout.count("\n") == 1


def test_somebody_elses_spare_folder_is_not_used(home, tmp_path):
    home.write_text("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    progress.spare().symlink_to(elsewhere)
    saved = progress.tried("0.1", "x", 1)
    assert saved.path == "" and list(elsewhere.iterdir()) == []


def test_two_stores_are_read_as_one():
    a, b = progress.empty(), progress.empty()
    old = {**progress._new_exercise(3), "passed": True, "score": 3.0, "attempts": 2, "first_passed": "2026-01-01"}
    old |= {"last_tried": "2026-01-01", "answer": {"tried": "p", "passed": "p"}}
    new = {**progress._new_exercise(3), "attempts": 1, "cause": "star", "last_tried": "2026-02-02"}
    new |= {"answer": {"tried": "q", "passed": ""}}
    a["exercises"]["0.2"], b["exercises"]["0.2"] = old, new
    a["predictions"]["p"] = {"value": 1.0, "predicted": "2026-01-02"}
    b["predictions"]["p"] = {"value": 2.0, "predicted": "2026-01-01"}
    b["revealed"] = {"q": "2026-01-01"}
    for merged in (progress.merged(a, b), progress.merged(b, a)):
        entry = merged["exercises"]["0.2"]
        assert (entry["passed"], entry["score"], entry["attempts"], entry["cause"]) == (True, 3.0, 2, "star")
        assert entry["answer"] == {"tried": "q", "passed": "p"}
        assert merged["predictions"]["p"]["value"] == 2.0 and merged["revealed"] == {"q": "2026-01-01"}


def test_the_table_lists_every_exercise_and_the_points(home, capsys):
    progress.tried("0.2", "x", 3)
    progress.judged("0.2", "x", True, 3.0, 3, "")
    progress.tried("99.1", "x", 2)
    assert progress.main() == 0
    out = capsys.readouterr().out
    assert "0.1" in out and "not attempted" in out and "99.1" in out
    line = next(line for line in out.splitlines() if line.startswith("0.2 "))
    assert "3/3" in line and "passed" in line
    assert progress.main(as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["exercises"]["0.2"]["score"] == 3.0


def test_columns_of_a_table_line_up():
    text = table.table(("a", "b"), [("long cell", "x"), ("y", "z")])
    assert text.splitlines() == ["a          b", "---------  -", "long cell  x", "y          z"]
