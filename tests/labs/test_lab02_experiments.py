"""Lab 02's experiments: training on more and more ranks, and training on a dataset that lets one wait."""

import importlib
import os
import re
import subprocess
import sys
import time

import pytest
import torch

from labkit.cli import experiments
from labkit.labs import lab02
from labkit.labs.lab02 import shards
from labkit.ranks.launch import RankFailed, launch

# The packages' names are those of their experiments.
scaling = importlib.import_module("labkit.labs.lab02.scaling")
loading = importlib.import_module("labkit.labs.lab02.loading")

QUICK = {"steps": 2, "batch": 2, "read_s": 0.001}


def test_the_labs_experiments_are_these_two_and_its_docstring_names_them():
    assert sorted(experiments(lab02)) == ["loading", "scaling"]
    assert "labkit run lab02.scaling" in lab02.__doc__ and "lab02.loading" in lab02.__doc__


@pytest.fixture
def none_starts(monkeypatch):
    """Ranks must not start: the arguments are looked at before."""

    def refuse(*_, **__):
        raise AssertionError("a rank was started")

    monkeypatch.setattr("labkit.ranks.launch.launch", refuse)


# Scaling


def test_training_on_1_2_and_3_ranks_keeps_every_step():
    told = []
    found = scaling.train_on((1, 2, 3), steps=3, batch=2, length=16, told=told.append)
    assert [each.world_size for each in found] == [1, 2, 3]
    assert [each.tokens for each in found] == [32, 64, 96]
    assert all(len(each.step_times_s) == len(each.losses) == 3 for each in found)
    assert all(0 < loss < 6 for each in found for loss in each.losses)
    assert len(told) == 3 and told[1].startswith("2 ranks")


def test_strong_scaling_trains_the_same_batch_on_more_ranks():
    one, two = scaling.train_on((1, 2), steps=3, batch=4, length=16, strong=True)
    assert one.tokens == two.tokens == 64
    assert one.losses == pytest.approx(two.losses, rel=1e-4)


def test_losses_fall():
    (found,) = scaling.train_on((1,), steps=20, batch=4, length=32)
    assert found.losses[-1] < found.losses[0] - 0.2


def test_a_batch_that_cannot_be_cut_is_told_with_one_that_can(none_starts):
    with pytest.raises(ValueError, match="batch of 5 rows cannot be cut for 4 ranks; batch=8 would do for 4"):
        scaling.train_on((4,), batch=5, strong=True)
    with pytest.raises(ValueError, match="batch of 6 rows cannot be cut for 4 ranks; batch=8 would do for 1, 2, 4"):
        scaling.scaling(strong=True, batch=6)
    with pytest.raises(ValueError, match="batch=18 would do for 2, 3, 9"):
        scaling.train_on(iter((2, 3, 9)), batch=16, strong=True)


WRONG = [
    ({"steps": 0}, "steps is a whole number, 1 or more, not 0; steps=8 would do"),
    ({"steps": 2.5}, "steps is a whole number.*not 2.5"),
    ({"batch": -1}, "batch is a whole number, 1 or more, not -1; batch=4 would do"),
    ({"length": 0}, "length is a whole number, 1 to .* not 0; length=64 would do"),
    ({"length": 10**9}, "length is a whole number, 1 to .* not 1000000000; length=64 would do"),
    ({"most": 0}, "most is a whole number, 1 or more, not 0; most=4 would do"),
    ({"most": "four"}, "most is a whole number.*not 'four'"),
    ({"strong": "false"}, "strong is True or False, not 'false'"),
    ({"deadline_s": 0}, "deadline_s is in seconds, more than 0, not 0; deadline_s=120 would do"),
]


@pytest.mark.parametrize("under_torchrun", [False, True])
@pytest.mark.parametrize("given, told", WRONG, ids=lambda each: str(each)[:20])
def test_an_argument_that_cannot_be_is_told_before_any_rank_starts(
    none_starts, monkeypatch, capsys, given, told, under_torchrun
):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")) if under_torchrun else ():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=told):
        scaling.scaling(**given)
    assert capsys.readouterr().out == ""


def test_world_sizes_that_cannot_be_are_told(none_starts):
    with pytest.raises(ValueError, match=r"world_sizes is empty; world_sizes=\(1, 2, 4\) would do"):
        scaling.train_on(())
    with pytest.raises(ValueError, match="world_size is a whole number, 1 or more, not 0"):
        scaling.train_on((1, 0))


def test_the_deadline_and_the_largest_number_of_ranks_are_passed_on(monkeypatch):
    seen = []

    def launched(fn, n, rows, length, steps, **how):
        seen.append((n, how["deadline_s"]))
        return [vars(made(n, 0.1))]

    monkeypatch.setattr("labkit.ranks.launch.launch", launched)
    scaling.scaling(most=9, deadline_s=7)
    assert seen == [(1, 7), (2, 7), (4, 7), (8, 7)]


def made(world_size, step_s, cores=2):
    return scaling.Scaling(world_size, 100 * world_size, (step_s, step_s, 9.0), (5.0, 4.0, 3.0), cores, "cpu")


def test_efficiency_is_tokens_per_second_over_as_many_times_those_of_the_first():
    found = [made(1, 0.1), made(2, 0.125), made(4, 0.4)]
    assert [each.tokens_per_s for each in found] == pytest.approx([1000, 1600, 1000])
    assert scaling.efficiency(found) == pytest.approx((1.0, 0.8, 0.25))


def test_the_table_says_which_ranks_take_turns():
    text = scaling.table([made(1, 0.1), made(2, 0.125), made(4, 0.4), made(8, 0.8)])
    assert re.search(r"^ +2 +200 +125.0 +1600 +80% +5.00 to 3.00$", text, re.M)
    assert text.splitlines()[-1].startswith("There are 2 cores") and "4, 8 ranks take turns" in text
    assert "take turns" not in scaling.table([made(1, 0.1, 8), made(4, 0.1, 8)])


def test_scaling_is_an_ordinary_script_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "labkit.cli", "run", "lab02.scaling", "steps=2", "batch=2", "length=16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ +2 +64 ", done.stdout, re.M)) == 1
    assert done.stdout.count("DistributedDataParallel") == 1


# Loading


def test_every_setting_is_measured_step_by_step():
    settings = (loading.Setting(0), loading.Setting(1), loading.Setting(0, cached=True))
    found = loading.load_with(settings, **QUICK)
    assert [each.setting for each in found] == list(settings)
    for each in found:
        assert len(each.wait_s) == len(each.compute_s) == 2
        assert min(each.wait_s) >= 0 and min(each.compute_s) > 0 and each.start_s > 0
        assert 0 <= each.starved <= 1
        assert len(each.worker_bytes) == each.setting.num_workers
    if sys.platform == "linux":
        assert found[1].worker_bytes[0] > 1e6


def test_without_workers_a_step_waits_for_its_samples_and_from_memory_it_does_not():
    settings = (loading.Setting(0), loading.Setting(0, cached=True))
    slow, cached = loading.load_with(settings, steps=3, batch=4, read_s=0.05)
    assert min(slow.wait_s) >= 4 * 0.05
    assert min(cached.wait_s) < 4 * 0.05 and cached.start_s >= 16 * 0.05


def test_every_rank_has_a_loader_of_its_own():
    found = loading.load_with((loading.Setting(1),), world_size=2, **QUICK)
    assert [each.rank for each in found] == [0, 1]


@pytest.mark.parametrize(
    "given, told",
    [
        ({"steps": 0}, "steps is a whole number, 1 or more, not 0; steps=16 would do"),
        ({"batch": 0}, "batch is a whole number.*not 0; batch=8 would do"),
        ({"world_size": 0}, "world_size is a whole number.*not 0; world_size=2 would do"),
        ({"read_s": -1}, "read_s is in seconds, 0 or more, not -1; read_s=0.002 would do"),
        ({"deadline_s": "long"}, "deadline_s is in seconds, more than 0, not 'long'; deadline_s=60 would do"),
    ],
)
def test_what_cannot_be_loaded_is_told_before_any_rank_starts(none_starts, given, told):
    with pytest.raises(ValueError, match=told):
        loading.loading(**given)


def test_settings_that_cannot_be_are_told(none_starts):
    with pytest.raises(ValueError, match="num_workers is a whole number, 0 or more, not -1"):
        loading.load_with((loading.Setting(-1),))
    with pytest.raises(ValueError, match="settings is empty"):
        loading.load_with(())


def test_longer_loading_can_be_given_a_longer_deadline():
    with pytest.raises(RankFailed) as failed:
        loading.load_with((loading.Setting(0, cached=True),), steps=50, batch=2, read_s=0.1, deadline_s=3)
    assert failed.value.cause.code == "deadline"
    assert len(loading.load_with((loading.Setting(0),), deadline_s=90, **QUICK)) == 1


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def worker_pids(path):
    """Runs in a rank: starts two workers, tells their process ids, and is ended without notice."""
    import multiprocessing
    import signal

    batches = iter(loading._loader(shards.SlowText(64, read_s=0.001), loading.Setting(2), 2))
    next(batches)
    with open(path, "w") as file:
        file.write(" ".join(str(child.pid) for child in multiprocessing.active_children()))
    os.kill(os.getpid(), signal.SIGKILL)


def orphaned_worker():
    """Runs in a rank: what a worker does whose rank was gone before it could ask to end with it."""
    if os.fork() == 0:
        loading.end_with_rank(os.getpid(), 0)  # not its parent's id, so the parent has ended
        os._exit(0)
    return os.waitstatus_to_exitcode(os.wait()[1])


def test_a_worker_whose_rank_has_ended_already_ends():
    assert launch(orphaned_worker, 1, prints="quiet") == [70]


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a way to tell a worker that its rank has died")
def test_workers_end_with_a_rank_that_is_killed(tmp_path):
    path = tmp_path / "pids"
    with pytest.raises(Exception, match="SIGKILL|signal|killed"):
        launch(worker_pids, 1, str(path), prints="quiet")
    pids = path.read_text().split()
    assert len(pids) == 2
    ends = time.monotonic() + 30
    while any(map(_alive, pids)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(map(_alive, pids))


def test_the_table_has_a_line_per_setting_and_rank():
    found = [
        loading.Loading(loading.Setting(0), 0, (0.03, 0.03, 0.06), (0.01, 0.01, 0.02), 0.2, (), 0.0),
        loading.Loading(loading.Setting(2, 6), 0, (0.0, 0.0), (0.01, 0.01), 0.3, (5_000_000, 4_000_000), 0.7),
    ]
    lines = loading.loading_table(found).splitlines()
    assert re.fullmatch(r"no workers +0 +30.0 +10.0 +75% +0.20 +0.0 +0.00", lines[1])
    assert re.fullmatch(r"2 workers, prefetch 6 +0 +0.0 +10.0 +0% +0.30 +5.0 +0.70", lines[2])


def test_samples_are_real_text_and_differ():
    dataset = shards.SlowText(50, length=32, read_s=0.0)
    samples = [dataset[i] for i in range(50)]
    assert all(sample.shape == (33,) and sample.dtype == torch.int64 for sample in samples)
    assert len({tuple(sample.tolist()) for sample in samples}) == 50
    assert bytes(samples[0].tolist()) in shards.text()
    with pytest.raises(IndexError, match="sample 50 of 50"):
        dataset[50]


def test_what_is_kept_in_memory_is_what_was_decoded():
    dataset = shards.SlowText(6, read_s=0.0)
    kept = shards.Decoded(dataset)
    assert len(kept) == 6 and all(torch.equal(kept[i], dataset[i]) for i in range(6))
