"""Findings about the machine: cores, memory, shared memory, disk, home, loopback, and what a parent may see.

Each says what there is for this process, inside its container's limits. Left out: speed; lab 01 measures it.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from labkit.check import progress
from labkit.cost.cores import group_files, usable_cores
from labkit.doctor import parse
from labkit.doctor.findings import Finding
from labkit.ranks.sockets import socket_bytes

RANKS = 4  # what most experiments start
RANK_BYTES = 500 * 10**6  # a training rank of the labs, resident
LOADER_BYTES = 256 * 10**6  # shared memory that lab 02's DataLoader workers fill


def findings() -> list[Finding]:
    """Everything about the machine but its GPUs."""
    room = [cores(usable_cores()), memory(usable_bytes()), shared_memory(), disk()]
    return [*room, home(), loopback(), evidence()]


def cores(count: float) -> Finding:
    """Ranks are processes: with fewer cores than ranks they take turns."""
    value = f"{count:g}"
    if count < 2:
        meaning = f"{RANKS} ranks take turns on it: results are the same, cells take a few times longer"
        return Finding("cores", "note", value, meaning)
    if count < RANKS:
        return Finding("cores", "ok", value, f"{RANKS} ranks share them: same results, stretched times")
    return Finding("cores", "ok", value)


def usable_bytes() -> int | None:
    """Memory that this process can still get, in bytes; None where the system does not tell."""
    try:
        available = parse.available_bytes(Path("/proc/meminfo").read_text())
    except OSError:  # macOS tells what there is, not what is free
        available = _sysconf_bytes()
    limits = [parse.cgroup_bytes(text) for text in group_files("memory.max")]
    used = [parse.cgroup_bytes(text) for text in group_files("memory.current")]
    left = [limit - (use or 0) for limit, use in zip(limits, used, strict=False) if limit]
    return min((n for n in [available, *left] if n is not None), default=None)


def _sysconf_bytes() -> int | None:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


def memory(num_bytes: int | None) -> Finding:
    """Four training ranks need 2 GB; eight, in lab 08, 4 GB."""
    if num_bytes is None:
        return Finding("memory", "note", "unknown", "four training ranks need 2 GB")
    value = f"{num_bytes / 1e9:.1f} GB available"
    if num_bytes < RANKS * RANK_BYTES:
        return Finding("memory", "problem", value, "four training ranks need 2 GB: close something")
    if num_bytes < 2 * RANKS * RANK_BYTES:
        return Finding("memory", "note", value, "enough for 4 ranks; the 8 of lab 08 need 4 GB")
    return Finding("memory", "ok", value)


def shared_memory(folder: str = "/dev/shm") -> Finding:
    """Ranks start without it; DataLoader workers and DeepSpeed pass tensors through it."""
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        meaning = "ranks start all the same; DataLoader workers (lab 02) and DeepSpeed do not"
        return Finding("shared memory", "note", f"{folder} is missing or not writable", meaning)
    free = shutil.disk_usage(folder).free
    value = f"{free / 1e9:.2f} GB free in {folder}"
    if free < LOADER_BYTES:
        meaning = "too little for DataLoader workers (lab 02); in Docker: docker run --shm-size=1g"
        return Finding("shared memory", "note", value, meaning)
    return Finding("shared memory", "ok", value)


def disk() -> Finding:
    """Checkpoints and offload (labs 04 and 05) write some hundred MB to the temporary folder."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    value = f"{free / 1e9:.1f} GB free in {folder}"
    if free < 10**8:
        return Finding("disk", "problem", value, "ranks cannot store a thing: free some space, or set TMPDIR")
    if free < 2 * 10**9:
        return Finding("disk", "note", value, "checkpoints and offload (labs 04 and 05) want 2 GB")
    return Finding("disk", "ok", value)


def home() -> Finding:
    """The folder of the learner's progress can be written."""
    folder = progress.home()
    standing = next(f for f in [folder, *folder.absolute().parents] if f.exists())
    try:
        with tempfile.TemporaryFile(dir=standing):
            return Finding("progress", "ok", f"kept in {folder}")
    except OSError as error:
        meaning = f"points are kept in {progress.spare()} only: set LABKIT_HOME to a folder of yours"
        return Finding("progress", "note", f"{folder} cannot be written ({error.strerror})", meaning)


def loopback() -> Finding:
    """gloo's ranks talk over 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        meaning = "ranks talk over it and cannot start: bring the interface lo up (ip link set lo up)"
        return Finding("loopback", "problem", f"127.0.0.1 does not answer ({error})", meaning)
    return Finding("loopback", "ok", "127.0.0.1 answers")


def evidence() -> Finding:
    """Whether a parent may read the bytes on its child's sockets: tried on a child that holds one."""
    with socket.socket() as sock:
        child = subprocess.Popen(["sleep", "20"], pass_fds=[sock.fileno()])
    try:
        seen = socket_bytes(child.pid)
    finally:
        child.kill()
        child.wait()
    if seen is None:
        meaning = "checks rest on what ranks record of themselves; grading should run where this works"
        return Finding("evidence", "note", "a rank's socket bytes cannot be read here", meaning)
    return Finding("evidence", "ok", "a rank's socket bytes can be read from outside")
