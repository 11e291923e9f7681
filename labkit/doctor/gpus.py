"""Findings about GPUs: how many, how they are linked, and whether this torch can use them.

All from nvidia-smi and package metadata; a CUDA context here would break the fork of ranks later.
Left out: GPUs of other makers, which the labs' NCCL paths do not know.
"""

import subprocess

from labkit.doctor import parse
from labkit.doctor.findings import Finding
from labkit.doctor.software import version
from labkit.ranks.backend import torch_cuda

QUERY = ("--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits")


def nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints; "" where it is missing, fails, or takes over 20 s (a driver that hangs)."""
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def findings() -> list[Finding]:
    """GPUs, their links, CUDA and NCCL."""
    found = parse.gpus(nvidia_smi(*QUERY))
    pairs = parse.links(nvidia_smi("topo", "-m")) if len(found) > 1 else {}
    cuda = torch_cuda()
    programs = [cuda_of_torch(found, cuda), nccl(found, cuda, nccl_version())]
    return [devices(found), *links(found, pairs), *programs]


def devices(found: tuple[parse.Gpu, ...]) -> Finding:
    """The GPUs by name, with their memory in GiB."""
    if not found:
        return Finding("GPUs", "ok", "none", "ranks run on the CPU; what only a GPU can show is shown stored")
    names = sorted({f"{gpu.name}, {gpu.num_bytes / 2**30:.0f} GiB" for gpu in found})
    value = f"{len(found)} x {'; '.join(names)}"
    if len(found) == 1:
        return Finding("GPUs", "ok", value, "ranks share it over gloo; NCCL wants one GPU per rank")
    return Finding("GPUs", "ok", value)


def links(found: tuple[parse.Gpu, ...], pairs: dict[tuple[int, int], str]) -> list[Finding]:
    """How the GPUs of a machine with several are linked; nothing on others."""
    if len(found) < 2:
        return []
    if not pairs:
        meaning = "predictions need one: choose it by hand"
        return [Finding("GPU links", "note", "not told by nvidia-smi", meaning)]
    value = parse.links_in_words(pairs)
    if not all(kind.startswith("NV") for kind in pairs.values()):
        meaning = "some pairs have no NVLink: tensor parallel across them is slow (lab 06)"
        return [Finding("GPU links", "note", value, meaning)]
    return [Finding("GPU links", "ok", value)]


def cuda_of_torch(found: tuple[parse.Gpu, ...], cuda: str | None) -> Finding:
    """Whether torch and the GPUs know of each other."""
    if found and cuda is None:
        meaning = "the GPUs stand idle: install torch's CUDA build"
        return Finding("CUDA", "note", "this torch is a CPU build", meaning)
    if not found:
        return Finding("CUDA", "ok", f"{cuda} in torch, and no GPU" if cuda else "not needed without a GPU")
    return Finding("CUDA", "ok", f"{cuda} in torch, driver {found[0].driver}")


def nccl_version() -> str | None:
    """NCCL's version from the package that torch's CUDA builds bring."""
    return next((v for v in map(version, ("nvidia-nccl-cu13", "nvidia-nccl-cu12")) if v), None)


def nccl(found: tuple[parse.Gpu, ...], cuda: str | None, nccl_found: str | None) -> Finding:
    """NCCL, which carries collectives between GPUs."""
    if not (found and cuda):
        return Finding("NCCL", "ok", "not needed: collectives go over gloo")
    return Finding("NCCL", "ok", nccl_found or "the one built into torch")
