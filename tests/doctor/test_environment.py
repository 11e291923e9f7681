"""What the doctor finds on machines rich and poor, and that each lack is told with its cost."""

import json
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from labkit.doctor import environment, gpus, machine, software
from labkit.doctor.findings import Finding, Report
from labkit.doctor.parse import Gpu
from labkit.ranks import backend

H100 = tuple(Gpu(index, "H100", 80 * 2**30, "535.1") for index in range(4))
NVLINK = {(a, b): "NV18" for a in range(4) for b in range(a + 1, 4)}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def report():
    return environment.examine()


def test_the_report_has_everything_asked_for(report):
    names = {finding.name for finding in report.findings}
    assert names >= {"Python", "torch", "DeepSpeed", "CUDA", "NCCL", "GPUs", "cores", "memory", "shared memory"}
    assert names >= {"system", "Jupyter", "disk", "progress", "loopback", "evidence"}


def test_whatever_is_not_well_says_what_it_costs(report):
    assert all(finding.meaning for finding in report.findings if finding.status != "ok")


def test_the_json_reads_back_as_the_findings(report):
    assert [Finding(**entry) for entry in json.loads(report.json())] == list(report.findings)


def test_the_text_has_a_line_for_each_value(report):
    lines = report.text().splitlines()
    assert all(any(line.startswith(f.name) and line.endswith(f.value) for line in lines) for f in report.findings)


def test_the_html_escapes_what_it_shows():
    shown = Report((Finding("torch", "problem", "<b>", "a & b"),))._repr_html_()
    assert "&lt;b&gt;" in shown and "a &amp; b" in shown and "PROBLEM" in shown


def test_about_is_one_line_with_versions_backend_and_ranks(capsys):
    assert environment.about(3) is None
    (line,) = capsys.readouterr().out.splitlines()
    for word in (f"torch {software.version('torch')}", "Python 3.", "3 ranks over gloo on"):
        assert word in line


def test_about_names_nccl_when_there_is_a_gpu_for_every_rank(monkeypatch, capsys):
    monkeypatch.setattr(backend, "gpu_count", lambda: 4)
    environment.about(4)
    environment.about(8)
    one, other = capsys.readouterr().out.splitlines()
    assert one.endswith("4 ranks over nccl on 4 GPUs")
    assert other.endswith("8 ranks over gloo on 4 GPUs")


def test_linked_gpus_are_well():
    assert gpus.devices(H100) == Finding("GPUs", "ok", "4 x H100, 80 GiB")
    assert gpus.links(H100, NVLINK) == [Finding("GPU links", "ok", "NV18 between all")]
    assert gpus.cuda_of_torch(H100, "13.0").value == "13.0 in torch, driver 535.1"
    assert gpus.nccl(H100, "13.0", "2.28.9").value == "2.28.9"


def test_gpus_without_nvlink_cost_tensor_parallel():
    (finding,) = gpus.links(H100[:2], {(0, 1): "SYS"})
    assert finding.status == "note" and "tensor parallel" in finding.meaning


def test_a_cpu_build_of_torch_leaves_gpus_idle():
    finding = gpus.cuda_of_torch(H100, None)
    assert finding.status == "note" and "idle" in finding.meaning


def test_no_gpu_is_no_lack():
    found = [gpus.devices(()), *gpus.links((), {}), gpus.cuda_of_torch((), None), gpus.nccl((), None, None)]
    assert {finding.status for finding in found} == {"ok"}


@pytest.mark.parametrize("script", ["exit 9", "echo 'NVIDIA-SMI has failed'; exit 1"])
def test_an_nvidia_smi_that_fails_is_as_good_as_none(tmp_path, monkeypatch, script):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpus.nvidia_smi("-L") == ""


def test_gpus_are_read_from_nvidia_smi_itself(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\n[ "$1" = topo ] || echo "0, Tesla T4, 15360, 550.54"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpus.findings()[0].value == "1 x Tesla T4, 15 GiB"


@pytest.mark.parametrize("package, status", [("torch", "problem"), ("deepspeed", "note")])
def test_a_missing_package_is_told_with_the_command_that_brings_it(monkeypatch, package, status):
    installed = software.version
    monkeypatch.setattr(software, "version", lambda name: None if name == package else installed(name))
    finding = getattr(software, package)()
    assert (finding.status, finding.value) == (status, "not installed")
    assert f"pip install {package}" in finding.meaning


def test_an_old_torch_is_a_problem(monkeypatch):
    monkeypatch.setattr(software, "version", lambda name: "2.9.1")
    assert software.torch().status == "problem"


def test_windows_is_sent_to_wsl(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    finding = software.system()
    assert finding.status == "problem" and "WSL" in finding.meaning


@pytest.mark.parametrize("transport, status", [("tcp", "note"), ("ipc", "ok"), (None, "ok")])
def test_a_kernel_on_tcp_is_worth_a_note(monkeypatch, transport, status):
    monkeypatch.setattr(software, "kernel_transport", lambda: transport)
    assert software.jupyter().status == status


@pytest.mark.parametrize("count, status", [(1, "note"), (1.5, "note"), (2, "ok"), (8, "ok")])
def test_cores(count, status):
    assert machine.cores(count).status == status


@pytest.mark.parametrize("num_bytes, status", [(10**9, "problem"), (3 * 10**9, "note"), (12 * 10**9, "ok")])
def test_memory(num_bytes, status):
    assert machine.memory(num_bytes).status == status


def test_a_container_limits_memory(monkeypatch):
    files = {"memory.max": ["1000000000"], "memory.current": ["400000000"]}
    monkeypatch.setattr(machine, "group_files", lambda name: files[name])
    assert machine.usable_bytes() == 600000000


def test_missing_shared_memory_costs_workers_and_deepspeed_but_not_ranks(tmp_path):
    finding = machine.shared_memory(str(tmp_path / "shm"))
    assert finding.status == "note"
    assert "ranks start all the same" in finding.meaning and "DeepSpeed" in finding.meaning


def test_dockers_64_mb_of_shared_memory_are_told_with_the_option(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(64 * 2**20, 0, 64 * 2**20))
    assert "--shm-size" in machine.shared_memory(str(tmp_path)).meaning


@pytest.mark.parametrize("free, status", [(10**7, "problem"), (10**9, "note"), (10**11, "ok")])
def test_disk(monkeypatch, free, status):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**12, 10**12 - free, free))
    assert machine.disk().status == status


def test_a_home_that_cannot_be_written_is_told_before_points_are_lost(monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", "/proc/no/such")  # not even root can write there
    finding = machine.home()
    assert finding.status == "note" and "LABKIT_HOME" in finding.meaning


def test_looking_at_home_leaves_nothing_there(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "a" / "b"))
    assert machine.home().status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_silent_loopback_is_a_problem(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(machine.socket, "create_server", refuse)
    assert machine.loopback().status == "problem"


def test_evidence_that_cannot_be_read_is_worth_a_note(monkeypatch):
    monkeypatch.setattr(machine, "socket_bytes", lambda pid: None)
    assert machine.evidence().status == "note"


@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
def test_looking_leaves_no_process():
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text() if children.exists() else ""
    machine.evidence()
    assert (children.read_text() if children.exists() else "") == before
