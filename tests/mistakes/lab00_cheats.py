"""Cheats on exercises 0.2 to 0.4: the right values by another way than the exercise asks for.

Each must be refused, and told what gave it away. Where two pieces of evidence catch the same cheat, either
cause will do: which one comes first depends on what the system lets the parent read. A cheat's `notebook` runs
first in the session that judges, as a cell would. What no evidence reaches, native code that makes its own
system calls, is not tried.
"""

import gc
import os
import sys
import tempfile
import threading
import time
from multiprocessing import shared_memory

import lab00_broadcast
import lab00_gather
import lab00_ring
import numpy as np
import torch
import torch.distributed as dist
from torch.utils import _python_dispatch as dispatch

# Made by the session that judges and gone with it; ranks get its name alone.
_KEPT = tempfile.TemporaryDirectory(prefix="labkit-cheats-")
FOLDER = _KEPT.name


def torchs_broadcast(tensor, root):
    dist.broadcast(tensor, src=root)
    return tensor


def torchs_all_gather(tensor, root):
    everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, tensor)
    return tensor.copy_(everything[root])


def torchs_all_reduce(tensor, root):
    if dist.get_rank() != root:
        tensor.zero_()
    dist.all_reduce(tensor)
    return tensor


def torchs_scatter(tensor, root):
    world_size = dist.get_world_size()
    same = [tensor.clone() for _ in range(world_size)] if dist.get_rank() == root else None
    dist.scatter(tensor, same, src=root)
    return tensor


def object_collective(tensor, root):
    held = [tensor]
    dist.broadcast_object_list(held, src=root)
    return tensor.copy_(held[0])


def functional_collective(tensor, root):
    """The collectives that torch.compile sees, under another name."""
    import torch.distributed._functional_collectives as functional

    return tensor.copy_(functional.broadcast(tensor, root, dist.group.WORLD))


def collective_with_modes_off(tensor, root):
    with dispatch._disable_current_modes():
        dist.broadcast(tensor, src=root)
    return tensor


def star_with_modes_off(tensor, root):
    """Without a mode there is no record of the messages, and no record has many rounds."""
    with dispatch._disable_current_modes():
        return lab00_broadcast.star(tensor, root)


def star_with_the_mode_popped(tensor, root):
    mode = dispatch._pop_mode()
    lab00_broadcast.star(tensor, root)
    dispatch._push_mode(mode)
    return tensor


def star_beneath_dispatch(tensor, root):
    with torch._C._DisableTorchDispatch():
        return lab00_broadcast.star(tensor, root)


def rank_zero_serves_everyone(tensor, root):
    rank = dist.get_rank()
    if root != 0 and rank == root:
        dist.send(tensor, dst=0)
    if root != 0 and rank == 0:
        dist.recv(tensor, src=root)
    return lab00_broadcast.star(tensor, 0)


def _for_show(tensor, root):
    """The right messages, carrying nothing."""
    lab00_broadcast.tree_by_doubling(torch.zeros_like(tensor), root)


def through_the_store(tensor, root):
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == root:
        store.set("labkit-cheat", tensor.float().numpy().tobytes())
    values = np.frombuffer(store.get("labkit-cheat"), dtype=np.float32).copy()
    return tensor.copy_(torch.from_numpy(values).view(tensor.shape))


def through_the_store_with_a_show(tensor, root):
    _for_show(tensor, root)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == root:
        store.set("labkit-cheat", repr(tensor.flatten().tolist()))
    values = eval(store.get("labkit-cheat").decode(), {"nan": float("nan")})
    return tensor.copy_(torch.tensor(values, dtype=tensor.dtype).view(tensor.shape))


def _file():
    return os.path.join(FOLDER, f"{os.getppid()}-{dist.get_world_size()}")


def through_a_file(tensor, root):
    if dist.get_rank() == root:
        torch.save(tensor, _file())
    _for_show(tensor, root)
    tensor.copy_(torch.load(_file()))
    return tensor


def through_a_memory_map(tensor, root):
    if dist.get_rank() == root:
        tensor.view(torch.uint8).numpy().tofile(_file())
    _for_show(tensor, root)
    held = np.memmap(_file(), dtype=np.uint8, mode="r")
    tensor.view(torch.uint8).copy_(torch.from_numpy(np.array(held)).view(tensor.view(torch.uint8).shape))
    return tensor


def through_shared_memory(tensor, root):
    """One block with the values, and a byte a rank that says it has read them."""
    name, num_bytes, world_size = f"labkit{os.getppid()}", tensor.nbytes, dist.get_world_size()
    if dist.get_rank() == root:
        block = shared_memory.SharedMemory(name, create=True, size=num_bytes + world_size)
        block.buf[:num_bytes] = bytes(tensor.flatten().view(torch.uint8).tolist())
    _for_show(tensor, root)
    if dist.get_rank() != root:
        block = shared_memory.SharedMemory(name)
        held = torch.tensor(list(block.buf[:num_bytes]), dtype=torch.uint8).view(tensor.dtype)
        tensor.copy_(held.view(tensor.shape))
    block.buf[num_bytes + dist.get_rank()] = 1
    while dist.get_rank() == root and not all(block.buf[num_bytes : num_bytes + world_size]):
        time.sleep(0.001)
    block.close()
    if dist.get_rank() == root:
        block.unlink()
    return tensor


def in_a_thread(tensor, root):
    """A dispatch mode belongs to one thread: another one goes unrecorded."""
    worker = threading.Thread(target=lab00_broadcast.star, args=(tensor, root))
    worker.start()
    worker.join()
    return tensor


def in_a_thread_that_is_left(tensor, root):
    """Returns at once; the thread fills the tensor while its rank hands it in."""
    threading.Thread(target=lab00_broadcast.tree_by_doubling, args=(tensor, root), daemon=True).start()
    return tensor


def reads_callers_frames(tensor, root):
    """Looks for the inputs of other ranks, and for expected values, before it does the work."""
    frame = sys._getframe(1)
    while frame is not None:
        for value in frame.f_locals.values():
            if (
                isinstance(value, (list, tuple))
                and len(value) > root
                and isinstance(value[root], torch.Tensor)
            ):
                return tensor.copy_(value[root])
        frame = frame.f_back
    return lab00_broadcast.tree_by_doubling(tensor, root)


def searches_all_objects(tensor, root):
    for value in gc.get_objects():
        if type(value) is torch.Tensor and value is not tensor and value.shape == tensor.shape:
            return tensor.copy_(value)
    return lab00_broadcast.tree_by_doubling(tensor, root)


def hard_coded(tensor, root):
    return tensor.fill_(1)


def patches_comparisons_in_the_rank(tensor, root):
    torch.equal = torch.allclose = lambda *args, **kwargs: True
    return lab00_broadcast.tree_by_doubling(tensor, root)


def patches_the_trace_in_the_rank(tensor, root):
    from labkit.record.trace import Trace

    Trace.__torch_dispatch__ = lambda self, func, types, args=(), kwargs=None: func(*args, **(kwargs or {}))
    return lab00_broadcast.star(tensor, root)


def patches_send_in_the_rank(tensor, root):
    real = dist.send
    dist.send = lambda values, dst: real(values, dst)
    return lab00_broadcast.tree_by_doubling(tensor, root)


def patched_comparison(tensor, root):
    return tensor


def _patch_comparison():
    torch.equal = torch.allclose = lambda *args, **kwargs: True
    from labkit.check import compare

    compare.difference = lambda *args, **kwargs: None


patched_comparison.notebook = _patch_comparison


def patched_judge(tensor, root):
    return tensor


def _patch_judge():
    from labkit.check import exercise
    from labkit.labs.lab00 import broadcast

    broadcast.judge = lambda fn, seed: exercise.right("trust me")


patched_judge.notebook = _patch_judge


def patched_check(tensor, root):
    return tensor


def _patch_check():
    from labkit.check import check, evidence, exercise

    evidence.ran = evidence.only_p2p = evidence.timeline = lambda *args: None
    check.verdict_on = lambda *args: exercise.right("trust me")


patched_check.notebook = _patch_check


def patched_trace(tensor, root):
    return lab00_broadcast.star(tensor, root)


def _patch_trace():
    from labkit.record import trace

    trace.Trace.__enter__ = lambda self: self


patched_trace.notebook = _patch_trace


BROADCAST = [
    (torchs_broadcast, "collective"),
    (torchs_all_gather, "collective"),
    (torchs_all_reduce, "collective"),
    (torchs_scatter, "collective"),
    (object_collective, "collective"),
    (functional_collective, "collective"),
    (collective_with_modes_off, "collective"),
    (star_with_modes_off, ("modes_disabled", "star")),
    (star_with_the_mode_popped, ("modes_disabled", "star")),
    (star_beneath_dispatch, ("modes_disabled", "star")),
    (rank_zero_serves_everyone, ("star", "detour")),
    (through_the_store, ("no_traffic", "dtype_lost")),
    (through_the_store_with_a_show, "store_used"),
    (through_a_file, "file_used"),
    (through_a_memory_map, ("file_used", "numpy_used", "shared_memory_used")),
    (through_shared_memory, ("shared_memory_used", "file_used")),
    (in_a_thread, ("thread_started", "star")),
    (in_a_thread_that_is_left, ("thread_started", "unmatched", "unreached")),
    (reads_callers_frames, ("frame_read", "unreached")),
    (searches_all_objects, ("frame_read", "unreached", "wrong_values")),
    (hard_coded, "wrong_values"),
    (patches_comparisons_in_the_rank, "patched"),
    (patches_the_trace_in_the_rank, ("patched", "star")),
    (patches_send_in_the_rank, "patched"),
    (patched_comparison, "patched"),
    (patched_judge, "patched"),
    (patched_check, "patched"),
    (patched_trace, "patched"),
]


def ring_by_all_gather(tensor):
    everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, tensor)
    return everything[dist.get_rank() - 1].clone()


def ring_by_all_to_all(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sends, receives = [0] * world_size, [0] * world_size
    sends[(rank + 1) % world_size] = receives[(rank - 1) % world_size] = tensor.numel()
    got = torch.empty_like(tensor)
    dist.all_to_all_single(got.view(-1), tensor.view(-1), receives, sends)
    return got


def ring_through_rank_zero(tensor):
    """Rank 0 collects every tensor and hands out every tensor."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    got = torch.empty_like(tensor)
    if rank == 0:
        held = [tensor] + [torch.empty_like(tensor) for _ in range(world_size - 1)]
        for source in range(1, world_size):
            dist.recv(held[source], src=source)
        for destination in range(1, world_size):
            dist.send(held[destination - 1], dst=destination)
        return held[-1]
    dist.send(tensor, dst=0)
    dist.recv(got, src=0)
    return got


def ring_with_a_barrier(tensor):
    dist.barrier()
    return lab00_ring.send_in_the_background(tensor)


def ring_sent_by_a_thread(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    got = torch.empty_like(tensor)
    sender = threading.Thread(target=dist.send, args=(tensor, (rank + 1) % world_size))
    sender.start()
    dist.recv(got, src=(rank - 1) % world_size)
    sender.join()
    return got


def ring_through_the_store(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"labkit-ring-{rank}", tensor.flatten().view(torch.uint8).numpy().tobytes())
    got = bytearray(store.get(f"labkit-ring-{(rank - 1) % world_size}"))
    return torch.frombuffer(got, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape).clone()


def ring_with_modes_off(tensor):
    with dispatch._disable_current_modes():
        return lab00_ring.all_round_the_ring(tensor)


def ring_hard_coded(tensor):
    return torch.zeros_like(tensor)


RING = [
    (ring_by_all_gather, "collective"),
    (ring_by_all_to_all, ("collective", "mismatch")),
    (ring_through_rank_zero, "too_many_messages"),
    (ring_with_a_barrier, "collective"),
    (ring_sent_by_a_thread, ("thread_started", "unmatched")),
    (ring_through_the_store, "no_traffic"),
    (ring_with_modes_off, ("too_many_messages", "modes_disabled")),
    (ring_hard_coded, "wrong_values"),
]


def gather_as_objects(tensor, root):
    parts = [None] * dist.get_world_size() if dist.get_rank() == root else None
    dist.gather_object(tensor, parts, dst=root)
    return torch.cat(parts) if parts else None


def gather_padded_by_torch(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = torch.zeros(world_size, dtype=torch.int64)
    rows[rank] = len(tensor)
    dist.all_reduce(rows)
    padded = tensor.new_zeros(int(rows.max()), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in range(world_size)] if rank == root else None
    dist.gather(padded, parts, dst=root)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)]) if parts else None


def gather_by_all_gather(tensor, root):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor)
    return torch.cat(parts) if dist.get_rank() == root else None


def gather_counts_in_the_store(tensor, root):
    """No message for the count: it goes another way."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"labkit-rows-{rank}", str(len(tensor)))
    if rank != root:
        dist.send(tensor, dst=root)
        return None
    parts = []
    for source in range(world_size):
        parts.append(tensor.new_empty(int(store.get(f"labkit-rows-{source}")), *tensor.shape[1:]))
        if source == root:
            parts[-1] = tensor
        else:
            dist.recv(parts[-1], src=source)
    return torch.cat(parts)


def gather_through_files(tensor, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.save(tensor, f"{_file()}-{rank}")
    lab00_gather.counts_first(tensor[:0], root)
    if rank != root:
        return None
    return torch.cat([torch.load(f"{_file()}-{source}") for source in range(world_size)])


def gather_padded_with_modes_off(tensor, root):
    with dispatch._disable_current_modes():
        return lab00_gather.padded_by_a_power_of_two(tensor, root)


def gather_in_a_thread(tensor, root):
    held = []
    worker = threading.Thread(target=lambda: held.append(lab00_gather.counts_first(tensor, root)))
    worker.start()
    worker.join()
    return held[0]


def gather_hard_coded(tensor, root):
    return torch.cat([tensor] * dist.get_world_size()) if dist.get_rank() == root else None


GATHER = [
    (gather_as_objects, "collective"),
    (gather_padded_by_torch, "collective"),
    (gather_by_all_gather, "collective"),
    (gather_counts_in_the_store, "store_used"),
    (gather_through_files, ("no_traffic", "file_used")),
    (gather_padded_with_modes_off, ("padding", "modes_disabled")),
    (gather_in_a_thread, "thread_started"),
    (gather_hard_coded, ("rows_missing", "padding_left_in", "wrong_values")),
]
