"""Lab 00: what its experiments show, the data behind its pictures, and the arithmetic of its judges.

That each judge refuses the wrong answers and cheats it should, and accepts the right ones, is tried on all of
them by tests/classroom/test_prove.py.
"""

import random
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from labkit.labs import lab00
from labkit.labs.lab00 import broadcast, gather, inputs, ring, rows
from labkit.ranks.outcome import RankFailed


def stub(*args):
    return NotImplemented


def star(tensor, root):
    if dist.get_rank() == root:
        for other in range(dist.get_world_size()):
            if other != root:
                dist.send(tensor, dst=other)
    else:
        dist.recv(tensor, src=root)
    return tensor


def passed_on(tensor, root):
    """Four ranks, root 0: rank 0 tells 2, then 0 tells 1 while 2 tells 3."""
    for source, destination in ((0, 2), (0, 1), (2, 3)):
        if dist.get_rank() == source:
            dist.send(tensor, dst=destination)
        elif dist.get_rank() == destination:
            dist.recv(tensor, src=source)
    return tensor


def keeps_its_own(tensor, *args):
    return tensor


def waits_for_nobody(tensor, root):
    dist.recv(tensor, src=(dist.get_rank() + 1) % dist.get_world_size())
    return tensor


@pytest.fixture(scope="module")
def source(repo):
    return (repo / "notebooks" / "source" / "lab00.py").read_text(encoding="utf-8")


def test_hello_lets_every_rank_speak(capsys):
    lab00.hello(world_size=3)
    told = capsys.readouterr().out
    assert re.findall(r"I am rank (\d) of 3", told) == ["0", "1", "2"]
    assert len(set(re.findall(r"process (\d+)", told))) == 3


def test_hello_is_an_ordinary_script_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "labkit.cli", "run", "lab00.hello"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"I am rank (\d) of 2", done.stdout)) == ["0", "1"]


def test_both_send_first_is_told_as_such(capsys):
    lab00.deadlock()
    told = capsys.readouterr().out
    assert "ranks 0 and 1 both send first" in told
    assert len(re.findall(r"rank \d: waiting in send", told)) == 2


def test_swapped_gradients_sum_to_101_and_are_told(capsys):
    lab00.mismatch()
    told = capsys.readouterr().out
    assert told.count("{'weight': 101.0, 'bias': 101.0}") == 2
    assert "mismatch" in told and "same order" in told


def test_the_rank_that_returned_early_is_named(capsys):
    lab00.skipped(world_size=3)
    told = capsys.readouterr().out
    assert "rank 2 returned" in told
    assert "all_reduce #3" in told


@pytest.mark.parametrize(("fn", "rounds", "count"), [(star, 3, 3), (passed_on, 2, 3)])
def test_messages_have_rounds_and_ends(fn, rounds, count):
    sent = lab00.messages(fn, 4, 0)
    assert len(sent) == count
    assert max(end for _, end, *_ in sent) == rounds
    assert {source for *_, source, _ in sent} == ({0} if fn is star else {0, 2})


def test_a_picture_of_a_function_that_hangs_says_why():
    with pytest.raises(RankFailed, match="receive"):
        lab00.messages(waits_for_nobody, 2, 0)


def test_while_a_function_is_a_stub_its_picture_shows_the_reference():
    sent, title = lab00.broadcast_picture(stub, star, 4)
    assert title == "not yet yours: star: 3 rounds" and len(sent) == 3
    shards, title = lab00.rows_picture(stub, 3, 4)
    assert title.startswith("not yet yours") and shards == [range(0, 1), range(1, 2), range(2, 3), range(0)]
    _, after, title = lab00.ring_picture(stub, 3)
    assert title.startswith("not yet yours") and after == [[20, 21], [0, 1], [10, 11]]
    _, after, title = lab00.gather_picture(stub, rows=(1, 0, 2), root=1)
    assert title.startswith("not yet yours") and after == [None, [0, 20, 21], None]


def test_a_picture_shows_what_the_learners_function_did():
    _, after, title = lab00.ring_picture(keeps_its_own, 2)
    assert title == "keeps_its_own" and after == [[0, 1], [10, 11]]
    before, after, _ = lab00.gather_picture(keeps_its_own, rows=(1, 2), root=0)
    assert before == after == [[0], [10, 11]]
    assert lab00.rows_picture(range, 4, 2)[0] == [range(4, 0, 2), range(4, 1, 2)]


@pytest.mark.parametrize("world_size", range(1, 9))
def test_the_rounds_allowed_are_those_of_doubling(world_size):
    know, rounds = 1, 0
    while know < world_size:
        know, rounds = 2 * know, rounds + 1
    case = broadcast.Case(tuple(torch.zeros(1) for _ in range(world_size)), 0)
    assert case.rounds == rounds
    assert case.power_of_two == (world_size in (1, 2, 4, 8))


@pytest.mark.parametrize("seed", range(20))
def test_cases_differ_between_ranks_and_reach_what_they_should(seed):
    cases = broadcast._cases(random.Random(seed))
    assert {case.world_size for case in cases} == set(range(1, 9))
    assert sum(case.root != 0 for case in cases) >= 6
    uneven = gather._cases(random.Random(seed))
    assert any(0 in case.rows for case in uneven) and all(case.rows[case.root] for case in uneven)
    assert all(len(set(case.rows)) >= case.world_size - 1 for case in uneven)
    assert all(case.root for case in uneven[1:3])
    if seed == 0:  # the ring's large input takes a moment to draw
        rings = ring._cases(random.Random(seed))
        assert sorted(case.world_size for case in rings) == [1, 2, 3, 4, 5]
        cases += rings
    for case in cases:
        assert not any(inputs.same(case.tensors[0], other) for other in case.tensors[1:])


def test_inputs_show_a_detour_through_float32():
    rng = random.Random(0)
    for dtype in ("int64", "float64", "int32"):
        value = inputs.tensor(rng, (5, 3), dtype)
        assert not inputs.same(value, inputs.through_float32(value)), dtype


def test_every_question_about_rows_is_about_another_rank_than_the_one_asked():
    dealt = rows._about_others(random.Random(3))
    asked = [(question, rank) for rank, questions in enumerate(dealt) for question in questions]
    assert all(question[1] != rank for question, rank in asked if question[2] <= 3)
    assert {question[2] for question, _ in asked} >= {1, 9}
    assert {size < world_size for (size, _, world_size), _ in asked} == {True, False}


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        ([range(0, 3), range(3, 6), range(6, 8), range(8, 10)], None),
        ([range(0, 2), range(2, 5), range(5, 7), range(7, 10)], None),
        ([range(0, 3), range(3, 6), range(6, 9), range(9, 12)], "past_the_end"),
        ([range(0, 4), range(3, 6), range(6, 8), range(8, 10)], "rows_repeated"),
        ([range(0, 3), range(3, 6), range(6, 8), range(8, 9)], "rows_missing"),
        ([range(3, 6), range(0, 3), range(6, 8), range(8, 10)], "out_of_order"),
        ([range(0, 4), range(4, 6), range(6, 8), range(8, 10)], "unbalanced"),
    ],
)
def test_shards_are_judged_by_what_they_hold(shards, problem):
    found = rows._problem(shards, 10)
    assert (found and found[0]) == problem


def test_the_source_has_each_exercise_with_its_minutes_and_two_hints(source):
    for exercise in lab00.EXERCISES:
        assert f'# %% exercise="{exercise.id}"\ndef {exercise.name}(' in source
        told = source[source.index(f"**Exercise {exercise.id}") :]
        told = told[: told.index("# %% exercise")]
        assert f"({exercise.minutes} min" in told
        assert told.count("<details>") == told.count("</details>") == 2
        assert f'labkit.check("{exercise.id}")' in source


def test_the_source_commits_the_learner_before_it_reveals(source):
    questions = re.findall(r'labkit\.predict\("(0\.\w+)", \.\.\.', source)
    assert 4 <= len(questions) == len(set(questions)) <= 6
    assert source.count("guess.reveal(") == len(questions)
    assert source.count("**Question.**") == len(questions)


def test_rows_are_told_with_the_last_one_included():
    told = [rows._rows(shard) for shard in (range(0, 3), range(3, 4), range(4, 4), range(-2, 1))]
    assert told == ["0 to 2", "3", "none", "-2 to 0"]
    assert rows._problem([range(10**30)] * 2, 10)[0] == "past_the_end"


def test_two_tensors_that_begin_alike_are_told_by_the_first_place_that_differs():
    expected = torch.arange(30).reshape(3, 10)
    got = expected.clone()
    got[1, 2] = -1
    assert inputs.apart(got, expected) == ("-1 (1 of 30 elements differ) at [1, 2]", "12 at [1, 2]")
    assert inputs.apart(got + 1, expected) == (inputs.head(got + 1), inputs.head(expected))


def test_a_part_that_came_is_told_from_values_of_nowhere():
    truth, own = torch.arange(6), torch.arange(6) + 10
    mixed = torch.cat([truth[:2], own[2:]])
    assert inputs.partly(mixed, truth, own)
    assert not inputs.partly(own, truth, own) and not inputs.partly(truth, truth, own)
    assert not inputs.partly(torch.cat([mixed[:5], torch.tensor([99])]), truth, own)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (torch.nn.Parameter(torch.ones(2)), "wrong_type"),
        (torch.ones(2, device="meta"), "wrong_type"),
        ([1.0, 1.0], "wrong_type"),
        (torch.ones(2).double(), "wrong_dtype"),
        (torch.ones(3), "wrong_shape"),
    ],
)
def test_a_result_of_another_kind_is_told_by_its_kind(value, cause):
    assert inputs.other_kind(value, torch.ones(2))[0] == cause
