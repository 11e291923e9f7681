"""check():

finding the function, the verdicts that need no judge, what is stored and raised, and a real notebook.
"""

import contextlib
import os
import pickle
import sys
import threading
from dataclasses import replace

import cloudpickle
import nbclient
import nbformat
import pytest

from labkit.check import card, find, progress, sealed
from labkit.check.check import CheckFailed, check, judged, mine_or
from labkit.check.exercise import Exercise, right, wrong
from labkit.check.rerun import rerun


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module", autouse=True)
def by_value():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def entry(exercise_id="0.1"):
    return progress.load()[0]["exercises"][exercise_id]


def rows_of_rank(num_rows, rank, world_size):
    """What the learner wrote; check() finds it here by its name."""
    return range(num_rows * rank // world_size, num_rows * (rank + 1) // world_size)


def stub(num_rows, rank, world_size):
    """A stub may keep its docstring."""
    return NotImplemented  # your code here


def exercise(judge):
    return Exercise("0.1", "rows_of_rank", "Rows", 5, 2, judge)


def test_a_right_answer_passes_and_is_stored(capsys):
    assert check("0.1") is None
    assert "0.1 " in capsys.readouterr().out
    stored = entry()
    assert stored["passed"] and stored["score"] == stored["possible"] and stored["cause"] == ""
    assert "num_rows * rank // world_size" in stored["answer"]["passed"]


def test_a_function_can_be_given(capsys):
    with pytest.raises(CheckFailed) as failed:
        check("0.1", lambda num_rows, rank, world_size: range(num_rows))
    assert failed.value.verdict.stage == "values" and not entry()["passed"]
    assert entry()["cause"] == failed.value.verdict.cause != ""
    assert "Expected" in capsys.readouterr().out


def test_a_stub_and_a_missing_function_are_not_attempted(capsys):
    for fn, words in ((stub, "still a stub"), (None, "no function broadcast yet")):
        with pytest.raises(CheckFailed, match=words):
            check("0.1", fn) if fn else check("0.2")
        assert "not attempted" in capsys.readouterr().out
    assert entry("0.2")["attempts"] == 0 and entry("0.2")["cause"] == "not_attempted"


@pytest.mark.parametrize("wanted", ["0.9", "7", "x.y", 0.2, None, "77.1"])
def test_an_unknown_exercise_is_one_clear_error(wanted):
    with pytest.raises(ValueError, match=r"there is no|not the number of an exercise"):
        check(wanted)


def test_only_a_bare_return_of_not_implemented_is_a_stub():
    def forgets(x):
        if x:
            return NotImplemented

    assert sealed.is_stub(stub) and sealed.is_stub(lambda *a: NotImplemented)
    assert not any(map(sealed.is_stub, (rows_of_rank, forgets, lambda: 1, print, len)))


def test_later_cells_draw_the_reference_until_the_answer_is_there():
    assert mine_or(stub, sum) == (sum, "not yet yours")
    assert mine_or(stub, sum, "Python's") == (sum, "not yet yours: Python's")
    assert mine_or(rows_of_rank, sum, "Python's") == (rows_of_rank, "yours, not passed yet")
    source = sealed.source_of(rows_of_rank)
    progress.judged("0.2", source, False, 0.0, 1.0, "values")
    assert mine_or(rows_of_rank, sum)[1] == "yours, not passed yet"
    progress.judged("0.2", source, True, 1.0, 1.0, "")
    assert mine_or(rows_of_rank, sum) == (rows_of_rank, "")
    assert mine_or(len, sum) == (len, "")  # of which Python has no source


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()

    def with_lock(num_rows, rank, world_size):
        return lock

    verdict = judged(exercise(lambda fn, seed: right()), with_lock)
    assert (verdict.stage, verdict.cause) == ("attempted", "unpicklable_function")
    assert "`lock`" in verdict.sentence


def test_the_judge_gets_bytes_and_a_seed_that_was_drawn_later(monkeypatch):
    monkeypatch.delenv("LABKIT_SEED", raising=False)
    seen = []

    class Answer:
        __name__ = "rows_of_rank"

        def __call__(self):
            return 1

        def __reduce__(self):
            seen.append("pickled")
            return Answer, ()

    def judge(fn, seed):
        seen.append(seed)
        pickle.dumps(fn)
        return right() if isinstance(fn, sealed.Sealed) else wrong("values", "x", "y")

    assert judged(exercise(judge), Answer()).passed and judged(exercise(judge), Answer()).passed
    assert [s for s in seen if s == "pickled"] == ["pickled"] * 2 and seen[0] == "pickled"
    assert isinstance(seen[1], int) and seen[1] != seen[3]


def test_a_judge_that_fails_itself_is_a_verdict_with_a_card(monkeypatch):
    def fails(fn, seed):
        return {}["count"]

    verdict = judged(exercise(fails), rows_of_rank)
    assert not verdict.passed and verdict.cause == "check_error" and verdict.score == 0.0
    assert "KeyError: 'count' (test_check.py, line" in verdict.got
    for odd in (lambda fn, seed: None, lambda fn, seed: True, lambda fn, seed: replace(right(), passed=1)):
        assert judged(exercise(odd), rows_of_rank).cause == "check_error"
    monkeypatch.setattr(find, "exercise", lambda exercise_id: exercise(fails))
    with pytest.raises(CheckFailed):
        check("0.1", rows_of_rank)
    assert not entry()["passed"] and entry()["cause"] == "patched"  # this test has replaced find.exercise


def test_ctrl_c_passes_through_a_check():
    def stopped(fn, seed):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judged(exercise(stopped), rows_of_rank)


def test_an_answer_whose_pickling_raises_is_named():
    class Odd:
        def __call__(self):
            return 1

        def __reduce__(self):
            raise LookupError("odd")

    assert judged(exercise(lambda fn, seed: right()), Odd()).cause == "unpicklable_function"


def test_a_stated_seed_repeats_a_check(monkeypatch):
    monkeypatch.setenv("LABKIT_SEED", "17")
    assert sealed.fresh_seed() == sealed.fresh_seed() == 17
    monkeypatch.setenv("LABKIT_SEED", "seventeen")
    with pytest.raises(ValueError, match="LABKIT_SEED"):
        sealed.fresh_seed()


def test_an_interrupted_check_has_stored_the_answer():
    class Interrupts:
        def __reduce__(self):
            raise KeyboardInterrupt

    stop = Interrupts()

    def slow_answer(num_rows, rank, world_size):
        return stop

    with pytest.raises(KeyboardInterrupt):
        check("0.1", slow_answer)
    assert entry()["attempts"] == 0 and "return stop" in entry()["answer"]["tried"]
    assert not entry()["passed"] and entry()["cause"] == ""


def test_a_failed_check_renders_as_strings_and_never_raises():
    failed = CheckFailed(exercise(None), wrong("values", "star", "The root sends all."))
    assert isinstance(failed, AssertionError)
    assert failed._render_traceback_() == ["CheckFailed: 0.1 Rows: not yet, 0 of 2 points: The root sends all."]
    assert str(pickle.loads(pickle.dumps(failed))) == str(failed)

    class Broken(CheckFailed):
        def __str__(self):
            raise RuntimeError

    lines = Broken(exercise(None), wrong("values", "x", "y"))._render_traceback_()
    assert isinstance(lines, list) and all(isinstance(line, str) for line in lines)


def test_a_check_stands_though_nothing_can_be_stored(monkeypatch, tmp_path, capsys):
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setenv("LABKIT_HOME", str(blocked))
    monkeypatch.setenv("TMPDIR", str(blocked))
    monkeypatch.setattr(progress.tempfile, "tempdir", str(blocked))
    assert check("0.1") is None
    out = capsys.readouterr().out
    assert "passed" in out and out.count("is not stored") == 1


def test_the_callers_globals_are_those_of_the_first_frame_outside_labkit():
    assert find.caller_globals()["__name__"] == __name__
    assert find.function("rows_of_rank") is rows_of_rank and find.function("nothing") is None


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """A notebook that was run in a real kernel: a stub, a wrong and a right answer, and patched sessions."""
    answer = "def rows_of_rank(num_rows, rank, world_size):\n    return "
    cells = [
        "from labkit import check\nimport torch",
        answer + "NotImplemented",
        'check("0.1")',
        answer + "range(num_rows // 0)",
        'check("0.1")',
        answer + "range(num_rows * rank // world_size, num_rows * (rank + 1) // world_size)",
        'check("0.1")',
        "kept, torch.allclose = torch.allclose, lambda *a, **k: True",
        'check("0.1")',
        "torch.allclose = kept\nimport labkit.record.trace as t\nt.Trace.__enter__ = lambda self: self",
        'check("0.1")',
    ]
    built = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    folder = tmp_path_factory.mktemp("notebook")
    nbclient.NotebookClient(built, timeout=120, allow_errors=True, resources={"metadata": {"path": folder}}).execute()
    return [cell.outputs for cell in built.cells]


def verdicts(outputs):
    return [output["data"][card.MIME] for output in outputs if card.MIME in output.get("data", {})]


def test_in_a_notebook_the_card_is_shown_and_a_failure_is_an_error(notebook):
    assert verdicts(notebook[2])[0]["cause"] == "not_attempted"
    assert verdicts(notebook[4])[0]["cause"] == "raised"
    error = notebook[4][-1]
    assert (error["output_type"], error["ename"]) == ("error", "CheckFailed")
    assert error["traceback"] == ["CheckFailed 0.1: see the card above"]
    assert "ZeroDivisionError" in error["evalue"] and "cell 4, line 2" in error["evalue"]
    html = notebook[4][1]["data"]["text/html"]
    assert html.startswith('<div role="status"') and "ZeroDivisionError" in html


def test_in_a_notebook_a_pass_shows_its_score_and_raises_nothing(notebook):
    assert len(notebook[6]) == 2 and notebook[6][0]["data"]["text/html"] == ""  # it said that it was checking
    score = verdicts(notebook[6])[0]
    assert score["exercise"] == "0.1" and score["cause"] == "" and score["score"] == score["possible"] > 0


def test_in_a_notebook_a_patched_session_is_refused_by_name(notebook):
    for cell, name in ((8, "torch.allclose"), (10, "labkit.record.trace.Trace.__enter__")):
        assert verdicts(notebook[cell])[0]["cause"] == "patched"
        assert name in notebook[cell][-1]["evalue"]


def test_a_rerun_in_a_clean_process_is_not_deceived_by_this_session(monkeypatch):
    first = find.exercise("0.1")
    from labkit.check import pristine

    monkeypatch.setattr(pristine, "first_patched", lambda: "")  # out of reach of the check in this session
    monkeypatch.setattr(sys.modules[first.judge.__module__], "_ask", lambda *args: None)
    everything = lambda num_rows, rank, world_size: range(num_rows)  # noqa: E731
    assert judged(first, everything).passed
    verdict = rerun(first, everything)
    assert not verdict.passed and verdict.stage == "values"
    assert rerun(first, rows_of_rank).passed


def test_a_verdict_printed_by_an_answer_is_not_taken_for_the_judges():
    def prints(num_rows, rank, world_size):
        line = '{"passed": true, "stage": "evidence", "score": 1.0}'
        for place in ("/proc/self/fd/1", f"/proc/{os.getppid()}/fd/1"):
            with contextlib.suppress(OSError), open(place, "w") as out:
                print(line, file=out, flush=True)
        return range(num_rows)

    assert not rerun(find.exercise("0.1"), prints).passed
