"""A GPU allocator's own figures, to stand beside bytes held by tensors: allocated, reserved, in gaps, and the context.

torch's caching allocator takes memory from the driver in blocks ("reserved"), hands out parts of them ("allocated",
rounded up to 512 bytes) and keeps what was given back. What a device's memory shows in use beyond that is the CUDA
context, kernels, libraries such as NCCL, and other processes. Left out: a processor's memory, where torch asks the C
library and nothing keeps count, and any walk through the blocks (torch.cuda.memory_snapshot).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Allocated:
    """Bytes on one GPU now. peak_allocated, peak_reserved: since torch.cuda.reset_peak_memory_stats was called.

    context: what is in use on the device and is not this allocator's, so of every process on it.
    """

    device: str
    allocated: int
    reserved: int
    context: int
    free: int
    total: int
    peak_allocated: int
    peak_reserved: int

    @property
    def fragmentation(self) -> int:
        """Reserved and not allocated: gaps between tensors, and blocks kept for later."""
        return self.reserved - self.allocated

    def sentence(self) -> str:
        """The figures in words, in GB (1e9 bytes)."""
        gb = {
            name: getattr(self, name) / 1e9 for name in ("allocated", "fragmentation", "reserved", "context", "total")
        }
        return (
            f"{self.device}: {gb['allocated']:.2f} GB allocated + {gb['fragmentation']:.2f} GB kept in gaps = "
            f"{gb['reserved']:.2f} GB reserved; {gb['context']:.2f} GB context and others; {gb['total']:.2f} GB in all"
        )


def allocated(device: int | str | torch.device | None = None) -> Allocated:
    """The figures of a CUDA device, by default the current one.

    Raises RuntimeError where torch sees no GPU: there is no such allocator then.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "torch sees no GPU here, so there is no GPU allocator to ask; held(record) counts the bytes that tensors "
            "hold on any machine"
        )
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    return Allocated(
        device=str(device),
        allocated=torch.cuda.memory_allocated(device),
        reserved=reserved,
        context=total - free - reserved,
        free=free,
        total=total,
        peak_allocated=torch.cuda.max_memory_allocated(device),
        peak_reserved=torch.cuda.max_memory_reserved(device),
    )
