"""What is left of a launch: nothing, whoever is killed, stopped or out of room, and however many run at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from labkit.ranks.launch import launch, run_ranks
from labkit.ranks.server import fork_server

ROOT = Path(__file__).resolve().parents[2]


def summed() -> float:
    x = torch.full((7,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return x[0].item()


def test_a_launch_leaves_no_process_descriptor_or_file(tmp_path):
    launch(summed, 2)
    before = os.listdir("/proc/self/fd"), {p.pid for p in psutil.Process().children(recursive=True)}
    launch(summed, 4)
    run_ranks(lambda: os._exit(3), 2)
    assert (os.listdir("/proc/self/fd"), {p.pid for p in psutil.Process().children(recursive=True)}) == before


def test_what_a_rank_started_ends_with_it():
    def start_child():
        return subprocess.Popen(["sleep", "300"]).pid

    pids = launch(start_child, 2)
    time.sleep(0.2)  # they were sent SIGKILL
    assert _alive(pids) == []


def test_what_a_rank_started_in_a_session_of_its_own_ends_with_the_last_rank():
    def start_children():
        tree = ["sh", "-c", "sleep 300 & echo $!; exec sleep 300"]
        child = subprocess.Popen(tree, start_new_session=True, stdout=subprocess.PIPE, text=True)
        return child.pid, int(child.stdout.readline())

    pids = [pid for pair in launch(start_children, 2) for pid in pair]
    time.sleep(0.5)  # they were sent SIGKILL
    assert _alive(pids) == []


def test_nothing_listens_while_ranks_run():
    def listening():
        dist.barrier()
        mine = psutil.Process().net_connections(kind="all")
        return [tuple(c.laddr) for c in mine if c.status == "LISTEN" and c.laddr and c.laddr[0] != "127.0.0.1"]

    assert launch(listening, 2) == [[], []]


def test_ranks_run_where_memory_files_are_refused(monkeypatch, tmp_path):
    def refuse(*args):
        raise PermissionError("not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # nobody else's files
    launch(summed, 2)
    before = os.listdir("/proc/self/fd")
    assert launch(summed, 3) == [6.0] * 3
    assert run_ranks(lambda: dist.get_rank() or dist.barrier(), 2).cause.code == "returned_early"
    assert (os.listdir("/proc/self/fd"), os.listdir(tmp_path)) == (before, [])


def test_a_killed_server_is_replaced():
    launch(summed, 2)
    os.kill(fork_server(os.getpid()).process.pid, signal.SIGKILL)
    fork_server(os.getpid()).process.wait(10)
    assert launch(summed, 2) == [3.0, 3.0]


def test_a_server_killed_in_mid_launch_is_told_and_replaced():
    def kill_server():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(5)

    outcome = run_ranks(kill_server, 2)
    assert outcome.cause.code == "server" and "forks ranks has ended" in outcome.cause.sentence
    assert launch(summed, 2) == [3.0, 3.0]


def test_a_sleeping_rank_is_no_stall():
    def straggler():
        if dist.get_rank() == 1:
            time.sleep(5)
        dist.barrier()
        return "done"

    assert launch(straggler, 2) == ["done", "done"]


def test_a_rank_that_waits_for_a_child_at_work_is_no_stall():
    def compile_something():
        if dist.get_rank() == 1:
            subprocess.run(["sleep", "5"], check=True)
        dist.barrier()
        return "done"

    assert launch(compile_something, 2) == ["done", "done"]


def script(body: str, **popen) -> subprocess.Popen:
    code = textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, **popen)  # fmt: skip


STUCK = """
    import os, sys, time, torch, torch.distributed as dist
    from labkit.ranks.launch import launch
    from labkit.ranks.rank import report
    def stuck():
        report(pid=os.getpid())
        while dist.get_rank() == 1:
            pass
        dist.all_reduce(torch.ones(1 << 22))
    def started(rank, values):
        print("pid", values["pid"], flush=True)
    print("server", flush=True)
"""


def _rank_pids(process: subprocess.Popen, count: int) -> list[int]:
    pids = []
    while len(pids) < count:
        line = process.stdout.readline()
        assert line, "the script ended early"
        if line.startswith("pid "):
            pids.append(int(line.split()[1]))
    return pids


def _alive(pids: list[int]) -> list[int]:
    alive = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
    return alive


def test_nothing_is_left_two_seconds_after_the_notebook_is_killed():
    process = script(STUCK + "    launch(stuck, 4, on_report=started)\n")
    pids = _rank_pids(process, 4)
    server = psutil.Process(pids[0]).ppid()
    process.kill()
    process.wait()
    time.sleep(2.0)
    assert _alive([*pids, server]) == []


def test_the_stop_button_ends_every_rank_and_gives_the_notebook_back():
    process = script(STUCK + """
    try:
        launch(stuck, 4, on_report=started)
    except KeyboardInterrupt:
        print("stopped", flush=True)
    print("next", launch(dist.get_rank, 2), flush=True)
    """)
    pids = _rank_pids(process, 4)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert "stopped" in rest and "next [0, 1]" in rest
    assert _alive(pids) == []


def test_a_script_without_a_main_guard_can_launch(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("from labkit.ranks.launch import launch\nprint(launch(lambda: 1, 2))\n")
    done = subprocess.run([sys.executable, path], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.stdout == "[1, 1]\n", done.stderr


def test_twenty_launches_at_once_from_one_notebook_are_all_right():
    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(lambda _: launch(summed, 3, prints="quiet"), range(20))) == [[6.0] * 3] * 20


def test_launches_of_many_notebooks_at_once_are_all_right(soak):
    code = """
        import torch, torch.distributed as dist
        from labkit.ranks.launch import launch
        def summed():
            x = torch.full((7,), float(dist.get_rank() + 1)); dist.all_reduce(x); return x[0].item()
        print(launch(summed, 4), flush=True)
    """
    processes = [script(code) for _ in range(20 if soak else 4)]
    outputs = [process.communicate(timeout=500)[0].strip() for process in processes]
    assert outputs == ["[10.0, 10.0, 10.0, 10.0]"] * len(processes)


def test_launch_works_without_memory_files_and_leaves_no_file(monkeypatch, tmp_path):
    """As on macOS: the same descriptors, from temporary files."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert launch(summed, 2) == [3.0, 3.0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="waits for root: mounts a full disk and hides /dev/shm")
@pytest.mark.parametrize("place", ["/dev/shm", "the temporary folder"])
def test_launch_works_on_a_full_disk_and_without_shared_memory(place, tmp_path):
    folder = place if place == "/dev/shm" else tmp_path
    code = "from labkit.ranks.launch import launch; print(launch(lambda: 1, 2))"
    shell = (f"mount -t tmpfs -o size=4k none {folder} && (cat /dev/zero > {folder}/full 2>/dev/null; "
             f"exec {sys.executable} -c '{code}')")  # fmt: skip
    done = subprocess.run(["unshare", "-m", "sh", "-c", shell], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, env={**os.environ, "TMPDIR": str(folder)})  # fmt: skip
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"waits for a machine that allows private mounts: {done.stderr.strip()}")
    assert done.stdout == "[1, 1]\n", done.stderr
