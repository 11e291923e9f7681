"""launch on real ranks: results, prints, reports, errors in the call, and what must be left afterwards."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labkit.ranks.launch import launch, run_ranks
from labkit.ranks.outcome import LaunchError, RankFailed
from labkit.ranks.rank import device, report

ROOT = Path(__file__).resolve().parents[2]


def summed() -> float:
    x = torch.full((7,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return x[0].item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_rank_joins_one_group(world_size):
    assert launch(summed, world_size) == [world_size * (world_size + 1) / 2] * world_size


def test_results_come_in_rank_order_even_when_rank_0_is_last():
    def late():
        time.sleep(0.3 if dist.get_rank() == 0 else 0)
        return dist.get_rank()

    assert launch(late, 3) == [0, 1, 2]


def test_each_rank_gets_the_common_and_its_own_arguments():
    assert launch(lambda a, b: (a, b), 3, "x", rank_args=[(10,), (20,), (30,)]) == [("x", 10), ("x", 20), ("x", 30)]


def test_every_call_has_fresh_ranks():
    def counted():
        os.environ["SEEN"] = str(int(os.environ.get("SEEN", 0)) + 1)
        torch.manual_seed(7)
        return os.getpid(), os.environ["SEEN"]

    first, second = launch(counted, 2), launch(counted, 2)
    assert [seen for _, seen in first + second] == ["1"] * 4
    assert len({pid for pid, _ in first + second}) == 4


def test_ranks_see_the_callers_folder_environment_and_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_SETTING", "on")
    (tmp_path / "beside_the_notebook.py").write_text("VALUE = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def look():
        import beside_the_notebook

        return os.getcwd(), os.environ["MY_SETTING"], beside_the_notebook.VALUE, os.environ["WORLD_SIZE"]

    assert launch(look, 2) == [(str(tmp_path), "on", 5, "2")] * 2


def test_one_thread_unless_asked():
    assert launch(torch.get_num_threads, 2) == [1, 1]
    assert launch(torch.get_num_threads, 2, threads=2) == [2, 2]


def test_prints_carry_their_rank(capfd):
    launch(lambda: print("hello"), 2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]


def test_ordered_prints_come_by_rank(capfd):
    def talk():
        time.sleep(0.2 if dist.get_rank() == 0 else 0)
        print("one\ntwo")

    launch(talk, 2, prints="ordered")
    assert capfd.readouterr().out.splitlines() == ["[rank 0] one", "[rank 0] two", "[rank 1] one", "[rank 1] two"]


def test_prints_stream_while_the_ranks_run(capfd):
    seen = []

    def talk():
        print("early")
        time.sleep(1.0)
        report(done=1)

    launch(talk, 1, on_report=lambda rank, values: seen.append(capfd.readouterr().out))
    assert seen == ["[rank 0] early\n"]


def test_prints_of_c_code_and_children_are_shown(capfd):
    launch(lambda: subprocess.run(["echo", "from a child"], check=True) and None, 1)
    assert "[rank 0] from a child" in capfd.readouterr().out


def test_ten_megabytes_of_prints_are_kept_and_shown_in_part(capfd):
    outcome = run_ranks(lambda: print("x" * 99 + "\n", end="") or print("\n".join(["y" * 99] * 100_000)), 1)
    assert len(outcome.output[0]) == 100 * 100_001
    shown = capfd.readouterr().out
    assert len(shown) < 100_000 and "MB more printed, not shown" in shown


def test_reports_reach_the_callback_in_order():
    def train():
        for step in range(3):
            report(step=step, loss=torch.tensor(1.0 / (step + 1)), name="a")

    seen = []
    launch(train, 2, on_report=lambda rank, values: seen.append((rank, values["step"], values["loss"])))
    assert [s for s in seen if s[0] == 1] == [(1, 0, 1.0), (1, 1, 0.5), (1, 2, pytest.approx(1 / 3))]


def test_a_report_over_4000_bytes_is_refused_in_one_sentence():
    with pytest.raises(RankFailed, match="a report is .* bytes long"):
        launch(lambda: report(text="x" * 5000), 1)


def test_a_rank_has_the_cpu_as_device_where_there_is_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("waits for a machine without a GPU")
    assert launch(lambda: str(device()), 2) == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("world_size", "says"),
    [(0, "can be 1 to 64"), (-1, "can be 1 to 64"), (1000, "can be 1 to 64"), ("4", "a whole number"),
     (True, "a whole number"), (2.0, "a whole number")],
)  # fmt: skip
def test_a_bad_world_size_is_one_clear_error(world_size, says):
    with pytest.raises(LaunchError, match=f"world_size is {world_size!r}.*{says}"):
        launch(summed, world_size)


def test_an_unpicklable_variable_is_named():
    lock = threading.Lock()
    with pytest.raises(LaunchError, match="variable `lock` .*used by `<lambda>`.* cannot be sent"):
        launch(lambda: lock, 2)


def test_an_unpicklable_variable_of_a_helper_is_named():
    lock = threading.Lock()

    def helper():
        return lock

    with pytest.raises(LaunchError, match="variable `lock` .*used by `helper`"):
        launch(lambda: helper(), 2)


def test_what_a_class_cannot_take_along_is_named_whatever_kind_of_member_uses_it():
    lock = threading.Lock()

    class ByMethod:
        def use(self):
            return lock

    class ByStatic:
        @staticmethod
        def use():
            return lock

    class ByProperty:
        @property
        def use(self):
            return lock

    class Holds:
        held = lock

    class Circle(torch.autograd.Function):
        held = lock

    Circle.kind = Circle
    for made, variable in ((ByMethod, "lock"), (ByStatic, "lock"), (ByProperty, "lock"), (Holds, "Holds.held"),
                           (Circle, "Circle.held")):  # fmt: skip
        for function in (made, lambda made=made: made()):
            with pytest.raises(LaunchError, match=f"variable `{variable}` .a lock., used by"):
                launch(function, 1)


def test_an_unpicklable_argument_is_named():
    with pytest.raises(LaunchError, match=r"argument 1 \(a lock\) cannot be sent"):
        launch(lambda a, b: None, 2, 1, threading.Lock())


@pytest.mark.parametrize(
    ("options", "says"),
    [({"rank_args": [(1,)]}, "1 entries for 2 ranks"), ({"deadline_s": 0}, "over 0"), ({"deadline_s": None}, "over 0"),
     ({"deadline_s": float("inf")}, "over 0"), ({"rank_args": [1, 2]}, "one tuple per rank"),
     ({"threads": 0}, "1 or more"), ({"preload": "numpy"}, "list of module names"),
     ({"on_report": 1}, "a function of"),
     ({"prints": "loud"}, "live, ordered, quiet"), ({"backend": "mpi"}, "'gloo' or 'nccl'")],
)  # fmt: skip
def test_a_bad_option_is_one_clear_error(options, says):
    with pytest.raises(LaunchError, match=says):
        launch(summed, 2, **options)


def test_a_module_that_cannot_be_preloaded_is_named():
    with pytest.raises(RankFailed, match="cannot import no_such_module_here"):
        launch(summed, 2, preload=["no_such_module_here"])
    assert launch(summed, 2) == [3.0, 3.0]


def test_launch_inside_a_rank_is_refused():
    from labkit.ranks import launch as module

    with pytest.raises(RankFailed, match="launch was called inside rank 0"):
        launch(lambda: module.launch(summed, 2), 1)


def test_an_exception_shows_its_traceback_and_line():
    def inner():
        raise KeyError("missing")

    with pytest.raises(RankFailed) as caught:
        launch(lambda: inner() if dist.get_rank() == 1 else None, 2)
    assert caught.value.cause.code == "raised" and caught.value.cause.rank == 1
    assert 'raise KeyError("missing")' in caught.value.cause.traceback
    assert all(isinstance(line, str) for line in caught.value._render_traceback_())


def test_a_large_result_and_a_large_argument_arrive_whole():
    x = torch.arange(10_000_000, dtype=torch.float32)
    back = launch(lambda y: y + 1, 2, x)
    assert all(torch.equal(y, x + 1) for y in back)


def test_parameters_and_objects_of_local_classes_come_back():
    from dataclasses import dataclass

    @dataclass
    class Point:
        x: int

    result = launch(lambda: (Point(dist.get_rank()), torch.nn.Linear(2, 2)), 2)
    assert [point.x for point, _ in result] == [0, 1] and result[0][1].weight.requires_grad


@pytest.mark.parametrize("traced", [False, True])
def test_a_blocking_call_is_known_as_blocking_also_under_a_trace(traced):
    def step():
        from labkit.record.trace import Trace

        x = torch.ones(4)
        with Trace() if traced else contextlib.nullcontext():
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()

    (entries, _) = run_ranks(step, 2).ledgers
    assert [(e.blocking, e.state) for e in entries] == [(True, "done"), (False, "done")]


def test_an_error_of_gloo_on_every_rank_is_raised_not_a_deadlock():
    def uneven():
        given = [torch.ones(dist.get_rank() + 1) for _ in range(2)]
        dist.all_to_all([torch.empty(1), torch.empty(1)], given)

    cause = run_ranks(uneven, 2).cause
    assert cause.code in ("raised", "mismatch"), cause


def test_a_root_that_does_not_exist_is_torchs_to_refuse():
    cause = run_ranks(lambda: dist.broadcast(torch.ones(1), src=7), 2).cause
    assert cause.code == "raised" and "rank 7 does not exist" in cause.sentence, cause


def test_a_message_to_oneself_is_a_wait_for_oneself():
    def narcissus():
        dist.send(torch.ones(1), dist.get_rank())

    cause = run_ranks(narcissus, 2, deadline_s=5).cause
    assert "all send first" not in cause.sentence and cause.code in ("raised", "deadlock"), cause


def test_launch_works_when_the_folder_was_deleted(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os; os.rmdir(os.getcwd()); from labkit.ranks.launch import launch; print(launch(lambda: 1, 2))"
    done = subprocess.run([sys.executable, "-c", code], cwd=gone, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.stdout == "[1, 1]\n", done.stderr


def test_a_cached_function_of_a_notebook_travels():
    import functools

    @functools.lru_cache(maxsize=3)
    def squared(x):
        return x * x

    squared.__module__ = "__main__"  # as in a cell
    assert launch(lambda: (squared(3), squared.cache_parameters()["maxsize"]), 2) == [(9, 3), (9, 3)]


def test_a_function_that_names_torchs_operators_travels():
    assert launch(lambda: torch.ops.aten.add(torch.ones(1), torch.ones(1)).item(), 2) == [2.0, 2.0]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_results_of_every_dtype_and_shape_come_back_also_untrusted(kind, shape):
    x = torch.ones(shape).to(kind)
    for trusted in (True, False):
        (back,) = run_ranks(lambda: x.t() if x.dim() == 2 else x, 1, trusted=trusted).results
        assert back.dtype == kind and torch.equal(back, x.t() if x.dim() == 2 else x)


def test_an_untrusted_result_cannot_run_code_here():
    class Evil:
        def __reduce__(self):
            return os.putenv, ("EVIL", "1")

    def evil():
        return [Evil()]

    outcome = run_ranks(evil, 1, trusted=False)
    assert outcome.cause.code == "unpicklable_result" and "putenv" in outcome.cause.sentence
    record = run_ranks(lambda: ({"a": [1, range(3)]}, None, torch.float32, torch.Size([2])), 1, trusted=False)
    assert record.results == (({"a": [1, range(3)]}, None, torch.float32, torch.Size([2])),)


def test_a_peer_that_does_not_exist_is_told_as_such():
    cause = run_ranks(lambda: dist.send(torch.ones(1), dst=4), 2).cause
    assert cause.code == "raised" and "rank 4 does not exist" in cause.sentence, cause


def test_tags_that_differ_are_told():
    def tagged():
        rank = dist.get_rank()
        work = dist.isend(torch.ones(1), 1 - rank, tag=rank)
        dist.recv(torch.ones(1), 1 - rank, tag=rank)
        work.wait()

    cause = run_ranks(tagged, 2).cause
    assert cause.code == "mismatch" and "must have the same tag" in cause.sentence, cause


def test_a_send_that_nobody_waited_for_is_told():
    def careless():
        got, rank = torch.zeros(1 << 20), dist.get_rank()
        if rank == 0:
            dist.isend(torch.ones(1 << 20), 1)
        else:
            time.sleep(0.3)
            dist.recv(got, 0)
        return float(got[0])

    cause = run_ranks(careless, 2).cause
    assert cause.code == "not_waited" and cause.rank == 0 and "call wait()" in cause.sentence, cause


class _Evil:
    def __reduce__(self):
        return os.putenv, ("EVIL", "1")


@pytest.mark.parametrize(
    "error", [lambda: SystemExit(_Evil()), lambda: SystemExit(lambda: 0), lambda: ValueError(_Evil())]
)
def test_what_an_exception_carries_is_not_opened(error):
    def fails():
        raise error()

    assert run_ranks(fails, 1, trusted=False).cause.code in ("exited", "raised")


def test_an_exception_that_cannot_be_shown_is_still_told():
    class Shy(Exception):
        def __str__(self):
            raise RuntimeError("no")

    def fails():
        raise Shy

    cause = run_ranks(fails, 1).cause
    assert cause.code == "raised" and "Shy" in cause.sentence


def test_waits_with_a_time_limit_are_no_stall():
    def patient():
        if dist.get_rank() == 1:
            threading.Event().wait(4)
        dist.barrier()
        return "done"

    assert launch(patient, 2) == ["done", "done"]


def test_megabytes_without_a_newline_are_no_burden():
    outcome = run_ranks(lambda: print("x" * 16_000_000, end=""), 1)
    assert outcome.cause is None and len(outcome.output[0]) == 16_000_000


def test_junk_in_the_report_pipe_and_a_callback_that_raises_leak_nothing():
    launch(summed, 2)
    before = os.listdir("/proc/self/fd")
    junk = [b"junk", b"[0, 5]", b"[[1], {}]", b"[" * 3000, b"[99, {}]", b"[true, {}]", b"[-1, {}]", b"7", b"\xff"]
    for line in junk:
        outcome = run_ranks(lambda line=line: os.write(int(os.environ["LABKIT_REPORT_FD"]), line + b"\n") and 1, 2)
        assert (outcome.results, outcome.reports) == ((1, 1), ()), line

    def refuse(rank, values):
        raise KeyError("callback")

    for _ in range(3):
        with pytest.raises(KeyError):
            launch(lambda: report(step=1), 2, on_report=refuse)
    assert os.listdir("/proc/self/fd") == before


def test_a_large_environment_and_a_failed_preload_do_not_hang(monkeypatch):
    for i in range(60):
        monkeypatch.setenv(f"LARGE_{i}", "x" * 10_000)
    with pytest.raises(RankFailed, match="cannot import no_such_module_here"):
        launch(summed, 2, preload=["no_such_module_here"])
    assert launch(summed, 2) == [3.0, 3.0]
