"""Lab 01: its sweep, its log, the data behind its pictures, and the arithmetic of its judges.

That each judge refuses the wrong answers and cheats it should, and accepts the right ones, is tried on all of them by
tests/classroom/test_prove.py.
"""

import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from labkit.classroom import prove
from labkit.cost import comm
from labkit.labs import lab01
from labkit.labs.lab01 import bandwidth, crossing, fit, hierarchy, inputs, ring, told
from labkit.ranks.outcome import RankFailed


def stub(*args):
    return NotImplemented


def around(tensor, *args):
    """Every rank sends its whole tensor to the right, once."""
    rank, n = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(tensor.clone(), dst=(rank + 1) % n)
    dist.recv(tensor, src=(rank - 1) % n)
    sending.wait()


def waits_for_nobody(tensor, *args):
    dist.recv(tensor, src=(dist.get_rank() + 1) % dist.get_world_size())


@pytest.fixture(scope="module")
def source(repo):
    return (repo / "notebooks" / "source" / "lab01.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def answers(repo):
    return prove.load(repo / "tests" / "mistakes" / "lab01.py")


# The sweep


def test_a_sweep_times_every_collective_and_keeps_every_repetition():
    found = lab01.measure(3, sizes=(1024, 50_000))
    assert [sweep.op for sweep in found] == list(lab01.OPS)
    for sweep in found:
        assert (sweep.world_size, sweep.sizes) == (3, (1024, 50_000))
        assert [len(times) for times in sweep.times_s] == [7, 7]
        assert all(0 < time < 60 for times in sweep.times_s for time in times)
        assert len(sweep.samples[0]) == len(sweep.samples[1]) == 14


def test_a_sweep_out_of_time_measures_once():
    (found,) = lab01.measure(2, ops=("broadcast",), sizes=(1024,), budget_s=0.0)
    assert len(found.times_s[0]) == 1


def test_an_unknown_collective_is_told_with_those_there_are():
    with pytest.raises(ValueError, match="all_sum.*all_reduce"):
        lab01.measure(2, ops=("all_sum",))


def test_the_table_has_nccl_tests_columns_with_right_numbers():
    sweep = lab01.Sweep("all_reduce", 4, (1_000_000,), ((0.004, 0.001, 0.002),))
    size, time_us, algbw, busbw = map(float, lab01.table(sweep).splitlines()[2].split())
    assert (size, time_us, algbw, busbw) == (1e6, 2000.0, 0.5, 0.75)
    assert lab01.table(sweep, lambda *question: 7e9).splitlines()[2].split()[-1] == "7.000"


def test_the_sweep_is_an_ordinary_script_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "labkit.cli", "run", "lab01.sweep", "largest_bytes=20000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+), 2 ranks$", done.stdout, re.M) == list(lab01.OPS)
    assert len(re.findall(r"^ +(?:1024|16384) ", done.stdout, re.M)) == 12


# The log


def test_the_example_log_has_the_times_of_the_named_machine():
    rows = lab01.nccl_log.read(lab01.nccl_log.example())
    assert [row.num_bytes for row in rows] == [2**power for power in range(10, 33, 2)]
    for row in rows:
        # 8 GPUs on NVLink 4: 14 messages of 0.6 us and a start of 6.6 us; 450 GB/s in one direction.
        time_s = 6.6e-6 + 14 * 0.6e-6 + 14 / 8 * row.num_bytes / 450e9
        assert row.time_s == pytest.approx(time_s, rel=1e-3)
        assert row.busbw == pytest.approx(14 / 8 * row.num_bytes / time_s, rel=1e-3, abs=5e6)


def test_the_example_log_is_in_the_documented_format():
    lines = lab01.nccl_log.example().splitlines()
    rows = [line for line in lines if not line.startswith("#")]
    number, row = r"[\d.]+", r" +\d+ +\d+ +float +sum +-1( +{0} +{0} +{0} +0){{2}}"
    assert rows and all(re.fullmatch(row.format(number), line) for line in rows)
    assert all(len(line) == len(rows[0]) for line in rows)
    head = next(line for line in lines if line.startswith("#       size"))
    assert head.split()[1:6] == ["size", "count", "type", "redop", "root"]
    mean = sum(row.busbw for row in lab01.nccl_log.read("\n".join(lines))) / len(rows) / 1e9
    assert float(re.search(r"# Avg bus bandwidth    : ([\d.]+)", "\n".join(lines))[1]) == pytest.approx(mean, rel=1e-3)


def test_a_text_without_rows_is_refused():
    with pytest.raises(ValueError, match="no rows"):
        lab01.nccl_log.read("# nThread 1 nGpus 8\nall fine\n")


# Pictures


def test_while_a_function_is_a_stub_its_picture_shows_what_is_due():
    assert lab01.sent_picture(stub, 4) == ([1.5] * 4, "stub, not yet yours: what is due")
    assert lab01.leaving_picture(stub, due=1.5) == ([1.5, 1.5], "stub, not yet yours: what is due")


def test_a_picture_shows_what_the_learners_function_sent():
    assert lab01.sent_picture(around, 3, 1000) == ([1.0] * 3, "around")
    assert lab01.leaving_picture(around, 4, 2, args=[2]) == ([1.0, 1.0], "around")


def test_a_picture_of_a_function_that_hangs_says_why():
    with pytest.raises(RankFailed, match="receive"):
        lab01.sent_picture(waits_for_nobody, 2, 10)


# Bytes between nodes


def event(op, ranks, sent, peer=None, root=None):
    return SimpleNamespace(op=op, ranks=tuple(ranks), sent_bytes=sent, peer=peer, root=root)


@pytest.mark.parametrize(
    ("rank", "one", "across"),
    [
        (1, event("send", range(4), 8, peer=2), 8),
        (1, event("send", range(4), 8, peer=0), 0),
        (0, event("all_reduce", (0, 1), 8), 0),
        (0, event("all_reduce", (0, 2), 8), 8),
        (1, event("all_gather", (0, 1, 2, 3), 9), 9),  # to rank 2
        (0, event("all_gather", (0, 1, 2, 3), 9), 0),  # to rank 1
        (3, event("all_gather", (0, 1, 2, 3), 9), 9),  # to rank 0
        (0, event("all_to_all", (0, 1, 2, 3), 9), 6),  # 2 of 3 others
        (2, event("gather", (0, 1, 2, 3), 5, root=1), 5),
        (0, event("gather", (0, 1, 2, 3), 5, root=1), 0),
        (0, event("barrier", (0, 1, 2, 3), 0), 0),
        (0, event("recv", (0, 1, 2, 3), 0, peer=2), 0),
    ],
)
def test_bytes_that_leave_a_node_are_counted_at_their_sender(rank, one, across):
    records = [SimpleNamespace(communications=[one] if r == rank else []) for r in range(4)]
    found = crossing.crossings(SimpleNamespace(records=records, world_size=4), 2)
    assert crossing.by_rank(found, 4) == [across if r == rank else 0 for r in range(4)]
    assert sum(crossing.by_node(found, 4, 2)) == across
    assert all(each.within_bytes == one.sent_bytes - across for each in found)


def test_two_levels_send_s_where_a_flat_ring_sends_one_and_a_half():
    case = hierarchy.Case(tuple(torch.ones(100) for _ in range(4)), 2)
    assert (case.leaving_bytes, case.flat_bytes, case.num_bytes) == (400, 600, 400)


# Judges


@pytest.mark.parametrize("seed", range(10))
def test_inputs_differ_between_ranks_and_their_sum_is_exact_in_any_order(seed):
    cases = [*ring._cases(random.Random(seed)), *hierarchy._cases(random.Random(seed))]
    for case in cases:
        assert len({tuple(tensor.flatten().tolist()) for tensor in case.tensors}) == len(case.tensors)
        backwards = inputs.total(case.tensors[::-1])
        exact = sum(tensor.double() for tensor in case.tensors)
        assert torch.equal(inputs.total(case.tensors), backwards)
        assert case.tensors[0].dtype == torch.int64 or torch.equal(backwards.double(), exact)


def test_rings_are_tried_on_even_and_uneven_chunks_and_alone():
    cases = ring._cases(random.Random(0))
    assert {case.world_size for case in cases} == {1, 2, 3, 4, 5}
    assert not cases[0].uneven and sum(case.uneven for case in cases) >= 4
    assert all(case.num_elements >= case.world_size for case in cases)
    assert len(cases[2].tensors[0].chunk(4)) == 3  # where torch.chunk gives fewer than asked for


def test_a_wrong_sum_is_known_by_its_numbers():
    tensors = tuple(torch.tensor([1, 10, 100, 1000]) * factor for factor in (1, 2, 3, 5))
    total = inputs.total(tensors)
    assert told.wrong_sum(tensors, list(tensors), 0)[0] == "unchanged"
    assert told.wrong_sum(tuple(t.float() for t in tensors), [total / 4] * 4, 0)[0] == "average"
    one_chunk = [torch.where(torch.arange(4) == rank, total, tensors[rank]) for rank in range(4)]
    assert told.wrong_sum(tensors, one_chunk, 0)[0] == "no_all_gather"
    assert told.wrong_sum(tensors, [total + tensors[rank] for rank in range(4)], 1)[0] == "added_twice"
    assert told.wrong_sum(tensors, [total * 0 - 1] * 4, 2)[0] == "wrong_values"


@pytest.mark.parametrize("seed", range(30))
def test_every_right_fit_is_within_the_limit_and_every_wrong_one_is_told_its_cause(seed, answers):
    cases = fit._cases(random.Random(seed))
    for fn in answers.RIGHT["1.3"]:
        assert max(case.off(*fn(case.sizes, case.times))[0] for case in cases) < fit.WITHIN, fn.__name__
    for fn, causes in answers.WRONG["1.3"]:
        results = [fit._plain(fn(case.sizes, case.times)) for case in cases]
        found = [fit._wrong_type(case, result) for case, result in zip(cases, results, strict=True)]
        if not any(found):
            found = [fit._wrong_line(cases, results, *pair) for pair in zip(cases, results, strict=True)]
        first = next(verdict for verdict in found if verdict is not None)
        assert first.cause in ((causes,) if isinstance(causes, str) else causes), fn.__name__


def test_measurements_are_delayed_as_the_task_says():
    for case in fit._cases(random.Random(7)):
        for size in fit.SIZES:
            true = case.alpha_s + case.beta_s * size
            times = [t for s, t in zip(case.sizes, case.times, strict=True) if s == size]
            assert len(times) == 5 and sum(t > 1.5 * true for t in times) <= 2
            assert all(0.85 < t / true < 40 for t in times)


def test_bus_bandwidth_is_asked_for_as_the_cost_model_has_it():
    rng = random.Random(1)
    for op in bandwidth.OPS:
        question = (op, rng.randint(1, 10**9), rng.randint(2, 600), rng.random())
        assert bandwidth._due(question) == pytest.approx(comm.busbw(*question))


def test_every_known_mistake_gives_other_numbers_than_the_right_answer_and_than_each_other():
    questions = [(op, 12345, n, 0.017) for op in bandwidth.OPS for n in (2, 5, 64)]
    made = {name: tuple(bandwidth._mistake(name, q) for q in questions) for name in bandwidth._SENTENCES}
    assert len(set(made.values())) == len(made)
    assert tuple(map(bandwidth._due, questions)) not in made.values()


# The source


def test_the_source_has_each_exercise_with_its_minutes_and_two_hints(source):
    for exercise in lab01.EXERCISES:
        assert f'# %% exercise="{exercise.id}"\ndef {exercise.name}(' in source
        text = source[source.index(f"**Exercise {exercise.id}") :]
        text = text[: text.index("# %% exercise")]
        assert f"({exercise.minutes} min" in text
        assert text.count("<details>") == text.count("</details>") == 2
        assert f'labkit.check("{exercise.id}")' in source


def test_the_source_commits_the_learner_before_it_reveals(source):
    questions = re.findall(r'labkit\.predict\("(1\.\w+)", \.\.\.', source)
    assert 4 <= len(questions) == len(set(questions)) <= 6
    assert source.count("guess.reveal(") == len(questions)
    assert source.count("**Question.**") == len(questions)


def test_the_source_says_that_the_log_was_not_measured(source):
    assert "It was not measured" in source and "cost model of one DGX H100" in source
