"""prove: every known answer of every lab gets its verdict, and prove itself tells a hit from a miss."""

import os
import random

import pytest

from labkit.check import find, sealed
from labkit.check.exercise import Verdict, right, wrong
from labkit.classroom import build, prove

SEED = 20261130
ROOT = build.find_root(__import__("pathlib").Path(__file__).parent)
EXERCISES = [exercise for number in find.labs() for exercise in find.lab(number).EXERCISES]
MISTAKES = """
import helper_of_mistakes

def everything(num_rows, rank, world_size):
    return range(num_rows)

def balanced(num_rows, rank, world_size):
    return helper_of_mistakes.edges(num_rows, rank, world_size)

def by_a_patched_session(num_rows, rank, world_size):
    return range(num_rows)

def replace_the_comparison():
    import torch
    torch.allclose = torch.equal = lambda *a, **k: True

by_a_patched_session.notebook = replace_the_comparison
WRONG = {"0.1": [(everything, "replicated"), (everything, "strided"), (everything, ("strided", "replicated"))]}
RIGHT = {"0.1": [balanced]}
CHEATS = {"0.1": [(by_a_patched_session, "patched")], "0.7": []}
"""
HELPER = """
def edges(num_rows, rank, world_size):
    return range(num_rows * rank // world_size, num_rows * (rank + 1) // world_size)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.id)
def test_every_known_answer_gets_its_verdict(exercise, soak):
    """All of them by a fresh seed under --soak (and by `labkit prove`). Otherwise a twenty-fourth and at least two,
    by a seed that stays, so that a run that fails has a change to blame; LABKIT_SEED gives another one.
    """
    file = prove.mistakes_file(exercise.id.split(".")[0].zfill(2), ROOT)
    mistakes = prove.load(file)
    seed = sealed.fresh_seed() if soak or "LABKIT_SEED" in os.environ else SEED
    rows, misses = list(prove.rows((exercise,), mistakes)), []
    for row in rows if soak else random.Random(seed).sample(rows, max(2, -(-len(rows) // 24))):
        verdict = prove.judge(row, file, seed)
        if not prove.as_expected(row, verdict):
            misses.append((row.name, row.causes, verdict))
    assert misses == [], f"with LABKIT_SEED={seed}"


@pytest.mark.parametrize("number", find.labs())
def test_a_lab_has_enough_answers_to_prove_its_checks(number):
    mistakes = prove.load(prove.mistakes_file(number, ROOT))
    assert prove.shortages(find.lab(number).EXERCISES, mistakes) == []
    assert all(mistakes.CHEATS.get(exercise.id) for exercise in find.lab(number).EXERCISES)


def test_a_miss_is_told_and_fails(tmp_path, capsys):
    folder = tmp_path / "tests" / "mistakes"
    folder.mkdir(parents=True)
    (folder / "lab00.py").write_text(MISTAKES)
    (folder / "helper_of_mistakes.py").write_text(HELPER)
    assert prove.main("0", root=tmp_path) == 1
    out = capsys.readouterr().out
    rows = {tuple(line.split()[:3]): line for line in out.splitlines() if line.startswith("0.1  ")}
    assert rows["0.1", "right", "balanced"].endswith("ok")
    assert rows["0.1", "cheat", "by_a_patched_session"].split()[-3:] == ["patched", "patched", "ok"]
    assert [line.split()[-1] for line in out.splitlines() if " everything " in line and line[:5] == "0.1  "] == [
        "ok",
        "MISS",
        "ok",
    ]
    assert "0.1 everything: strided expected, replicated:" in out
    for told in ("0.1 has 3 wrong answers; at least 5", "0.1 has 1 right answers; at least 2", "no exercise 0.7"):
        assert told in out
    assert "LABKIT_SEED=" in out


def test_a_row_is_as_expected_only_with_its_own_cause():
    row = prove.Row(EXERCISES[0], "wrong", None, ("star",))
    assert prove.as_expected(row, wrong("evidence", "star", ""))
    assert not prove.as_expected(row, wrong("evidence", "chain", ""))
    assert not prove.as_expected(row, right())
    assert not prove.as_expected(row, Verdict(True, "evidence", "star"))
    accepted = prove.Row(EXERCISES[0], "right", None, ())
    assert prove.as_expected(accepted, right()) and not prove.as_expected(accepted, wrong("shape", "x", ""))


def test_a_lab_without_mistakes_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="no mistakes for lab 00"):
        prove.main("00", root=tmp_path)
    with pytest.raises(ValueError, match="there is no lab '66'"):
        prove.main("66", root=tmp_path)
