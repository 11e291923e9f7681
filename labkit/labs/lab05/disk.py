"""Judge of exercise 5.2, `DiskAdam`: AdamW whose state lies in files, and in RAM only a piece at a time.

Weights of fp32 and bf16, given gradients; the folder is renamed between two processes, and the second goes on from it.
Values: those of torch's AdamW on fp32 masters, in both. Evidence: bytes of the files; bytes of RAM that no file backs,
kept between steps (a few per parameter) and taken within one (pieces of `chunk` numbers, not whole tensors), whether
in tensors, numpy's arrays or other objects; and, for one larger tensor and without any watch, the kernel's own count;
what is said when the disk is full. Files may be mapped, or read and written. Left out: how the kernel keeps pages of
files in memory, and a machine that loses power.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab05.adam as adam
import labkit.labs.lab05.disk_steps as steps
from labkit.check import evidence
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.inputs import head
from labkit.labs.lab05.asked import honest_but

NAME = "DiskAdam"
# What this exercise is about: files, mapped or read, by torch or by numpy.
ALLOWED = ("file_used", "shared_memory_used", "numpy_used")
CHUNK, PIECES, ROOM_BYTES = 4096, 12, 192 * 1024
# So large that what a process takes beside the state, below 1 MB in right answers, is little.
WIDE, WIDE_CHUNK = 2**21, 2**14


@dataclass(frozen=True)
class Case:
    """start: weights. grads: by step, then parameter, None where it took no part. restart: first step of the second
    process.
    """

    start: tuple[Any, ...]
    grads: tuple[tuple[Any, ...], ...]
    restart: int
    options: dict[str, Any]

    @property
    def elements(self) -> int:
        return sum(each.numel() for each in self.start)

    @property
    def tried(self) -> str:
        given = ", ".join(f"{name}={self.options[name]:.4g}" for name in ("lr", "eps", "weight_decay", "chunk"))
        shapes = ", ".join(f"{tuple(each.shape)} {str(each.dtype)[6:]}" for each in self.start)
        return f"{given}; {shapes}"


def judge(cls: Callable, seed: int) -> Verdict:
    """Some steps, then the same folder under another name in a new process, then a folder on a full disk."""
    case = _case(random.Random(seed))
    parent = tempfile.mkdtemp(prefix="labkit-disk-")
    try:
        return _judged(cls, case, parent)
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def _judged(cls: Callable, case: Case, parent: str) -> Verdict:
    folder, moved, full = (os.path.join(parent, name) for name in ("state", "moved", "full"))
    args = (cls, folder, case.start, case.grads[: case.restart], case.options)
    first = evidence.observe(steps.update, 1, args=args, deadline_s=40.0)
    found = _ran(case, first, "") or _values(case, first.results[0]["weights"], 0)
    found = found or _files(case, steps.files(folder)) or _ram(case, first.results[0]) or _honest(case, first)
    if found is not None:
        return found
    weights = first.results[0]["weights"]
    os.rename(folder, moved)
    os.mkdir(full)
    args = (cls, moved, tuple(weights[-1]), case.grads[case.restart :], case.options, full)
    second = evidence.observe(steps.update, 1, args=args, deadline_s=40.0)
    found = _ran(case, second, "in a second process, with the folder of the first, renamed: ")
    found = found or _values(case, weights + second.results[0]["weights"], case.restart)
    found = found or _full(case, second.results[0]["full"], full)
    found = found or _again(case, second.results[0]["again"]) or _honest(case, second)
    found = found or _grown(cls, os.path.join(parent, "wide"))
    seen, sizes = first.results[0], steps.files(moved)
    return found or right(
        f"{sum(sizes.values())} bytes of state on disk for {case.elements} parameters; RAM beside weights and "
        f"gradients {seen['kept']} bytes between steps and at most {seen['peak']} within one; a new process went on"
    )


def _case(rng: random.Random) -> Case:
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    large, odd = rng.randint(70, 80), 2 * rng.randint(10, 30) + 1
    shapes = [((large, CHUNK + odd), torch.float32), ((odd, 3), torch.float32), ((), torch.float32)]
    shapes += [((large // 2, CHUNK + odd), torch.bfloat16), ((CHUNK,), torch.bfloat16)]
    start = [torch.randn(shape, generator=generator).div(8).to(dtype) for shape, dtype in shapes]
    grads = [[torch.randn(each.shape, generator=generator).to(each.dtype) for each in start] for _ in range(5)]
    grads[1][1] = grads[3][1] = None
    options = {
        "lr": rng.uniform(1e-3, 3e-3),
        "betas": (rng.uniform(0.8, 0.92), rng.uniform(0.95, 0.99)),
        "eps": 10 ** rng.uniform(-3, -2),
        "weight_decay": rng.uniform(0.05, 0.3),
        "chunk": CHUNK,
    }
    return Case(tuple(start), tuple(map(tuple, grads)), 3, options)


def _adams(case: Case) -> dict[str, Any]:
    return {name: case.options[name] for name in adam.NAMES}


def _ran(case: Case, observed: Observed, when: str) -> Verdict | None:
    failed = attempts.ran(observed, NAME, case.tried)
    if failed is None or not when or failed.cause in attempts.CAUSES:
        return failed
    if any(type(result) is attempts.Unusable for result in observed.results):
        return failed
    sentence = f"{when}{failed.sentence}"
    return wrong("attempted", "no_restart", sentence, case.tried, failed.got, "it goes on from the files")


def _values(case: Case, weights: list[list[Any]], first: int) -> Verdict | None:
    """first: the step from which on to look, those before being right."""
    options = _adams(case)
    for number, start in enumerate(case.start):
        grads = [of_step[number] for of_step in case.grads[: len(weights)]]
        due = adam.serial(start, grads, options)
        got = [of_step[number] for of_step in weights]
        for step in range(first, len(weights)):
            if not adam.close(got[step], due[step], options["lr"]):
                if first:
                    cause, sentence = _restarted(case, got, start, grads)
                else:
                    code = adam.mistaken(got, start, grads, options, len(case.start))
                    cause, sentence = code or "wrong_values", adam.SENTENCES[code]
                where = f"step {step}, parameter {number}: {head(got[step])}"
                return wrong("values", cause, sentence, case.tried, where, head(due[step].to(got[step].dtype)))
    return None


def _restarted(case: Case, got: list[Any], start: Any, grads: list[Any]) -> tuple[str, str]:
    """What the second process did not find in the folder."""
    options, at = _adams(case), case.restart
    fresh = adam.serial(got[at - 1], grads[at:], options)
    if all(adam.close(g, d, options["lr"]) for g, d in zip(got[at:], fresh, strict=True)):
        return "state_lost", "the second process begins anew: when the folder holds state already, go on from it."
    for code, sentence in (
        ("count_lost", "moments are there after the restart, but steps are counted from 0 again: keep the count too."),
        ("master_lost_again", "after the restart the master is the rounded weight again: keep it with the state."),
        ("both_lost", "after the restart moments are there, but neither the count of steps nor the master."),
    ):
        due = adam.resumed(code, start, grads, options, at, got[at - 1])
        if all(adam.close(g, d, options["lr"]) for g, d in zip(got, due, strict=True)):
            return code, sentence
    return "wrong_restart", "the second process does not go on where the first one stopped."


def _files(case: Case, sizes: dict[str, int]) -> Verdict | None:
    import torch

    least = sum(each.numel() * (8 if each.dtype == torch.float32 else 12) for each in case.start)
    most = 16 * case.elements + 8192 * len(case.start)
    total = sum(sizes.values())
    got, expected = f"{total} bytes in {len(sizes)} files of the folder", f"{least} to {most}"
    if total < least:
        sentence = "the folder holds too little for the state: two moments in fp32, and a master of what is narrower."
        sentence = sentence if total else "nothing was written into the folder while training: state lies there."
        return wrong("evidence", "not_on_disk", sentence, case.tried, got, expected)
    if total > most:
        sentence = "the folder holds more than two moments, a master and a count need."
        return wrong("evidence", "too_much_on_disk", sentence, case.tried, got, expected)
    return None


def _ram(case: Case, seen: dict[str, Any]) -> Verdict | None:
    largest = 4 * max(each.numel() for each in case.start)
    if seen["left"]:
        sentence = "zero_grad() leaves gradients: set them to None."
        return wrong("evidence", "gradients_held", sentence, case.tried, f"parameters {seen['left']}", "none")
    if seen["private"] > ROOM_BYTES:
        sentence = "files are mapped for this process alone: what it changes stays in RAM and never reaches the file. "
        sentence += "shared=True, or a mode in which they are written, does it."
        got = f"{seen['private']} bytes mapped privately"
        return wrong("evidence", "private_map", sentence, case.tried, got, f"at most {ROOM_BYTES}")
    if seen["kept"] > ROOM_BYTES:
        sentence = "state stays in RAM between steps: let it lie in the files."
        got = f"{seen['kept']} bytes of RAM that no file of the folder backs"
        return wrong("evidence", "state_in_ram", sentence, case.tried, got, f"at most {ROOM_BYTES}")
    most = PIECES * 4 * CHUNK + ROOM_BYTES
    if seen["peak"] > most:
        sentence = f"a step takes RAM for whole tensors ({largest} bytes the largest): go through them in pieces of "
        sentence += f"chunk = {CHUNK} numbers, and the gradient too, before float()."
        return wrong("evidence", "not_in_pieces", sentence, case.tried, f"{seen['peak']} bytes", f"at most {most}")
    return None


def _grown(cls: Callable, folder: str) -> Verdict | None:
    """What no tensor and no large object shows: memory from C, anonymous maps, many small objects."""
    from labkit.ranks.launch import run_ranks

    args = (cls, folder, WIDE, WIDE_CHUNK)
    outcome = run_ranks(steps.grown, 1, *args, deadline_s=40.0, backend="gloo", prints="quiet", trusted=False)
    tried = f"three updates of {WIDE} parameters in fp32, chunk = {WIDE_CHUNK}"
    if outcome.cause is not None:
        return wrong("attempted", outcome.cause.code, f"{outcome.cause.sentence}", tried)
    num_bytes, most = outcome.results[0], 4 * WIDE
    if type(num_bytes) is int and num_bytes <= most:
        return None
    sentence = "state stays in RAM between steps, where no tensor shows it: let it lie in the files."
    got = f"{num_bytes} bytes more that no file backs, by the kernel's count"
    return wrong("evidence", "state_in_ram", sentence, tried, got, f"at most {most}, half of the moments")


def _full(case: Case, raised: tuple[str, str], folder: str) -> Verdict | None:
    kind, message = raised
    needed = 8 * steps.FULL_ELEMENTS
    expected = f"an OSError that names {folder} and the bytes that it needs, {needed} or more"
    tried = f"DiskAdam of {steps.FULL_ELEMENTS} parameters where {steps.FREE_BYTES} bytes are free"
    if not kind:
        sentence = "a disk without room goes unnoticed; a mapped file then ends the process by a signal, mid-step. "
        sentence += "Ask shutil.disk_usage before making the files."
        return wrong("evidence", "full_disk_unnoticed", sentence, tried, "no error", expected)
    numbers = [int(re.sub("[,_]", "", each)) for each in re.findall(r"\d[\d,_]*", message.replace(folder, ""))]
    tells = folder in message and any(needed <= number <= 3 * needed for number in numbers)
    if kind != "OSError" or not tells:
        sentence = "on a full disk the error should say in a line how many bytes it needs, and where."
        return wrong("evidence", "full_disk_unclear", sentence, tried, f"{kind}: {message}", expected)
    return None


def _again(case: Case, raised: tuple[str, str]) -> Verdict | None:
    """What it raised when opened on a disk that the state itself had filled."""
    kind, message = raised
    if not kind:
        return None
    sentence = "state that is there already needs no more room: ask only for files that are yet to be made, or a "
    sentence += "restart fails on the disk that the state itself has filled."
    tried = f"DiskAdam on a folder with its state, where {steps.FREE_BYTES} bytes are free"
    return wrong("evidence", "restart_needs_room", sentence, tried, f"{kind}: {message}", "it goes on")


def _honest(case: Case, observed: Observed) -> Verdict | None:
    return honest_but(observed, ALLOWED, case.tried)
