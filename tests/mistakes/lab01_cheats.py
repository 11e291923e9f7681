"""Cheats on exercises 1.1 and 1.4: the right sum by another way than the exercise asks for.

Each must be refused, and told what gave it away. Where two pieces of evidence catch the same cheat, either cause will
do. A cheat's `notebook` runs first in the session that judges, as a cell would.
"""

import os
import sys
import tempfile
import threading

import lab01_hierarchy
import lab01_ring
import torch
import torch.distributed as dist
from torch.utils import _python_dispatch as dispatch


def torchs_all_reduce(tensor):
    dist.all_reduce(tensor)
    return tensor


def torchs_all_reduce_behind_a_show(tensor):
    """The right messages, carrying zeros, and the sum from a collective."""
    show = torch.zeros_like(tensor)
    lab01_ring.in_two_loops(show)
    dist.all_reduce(tensor)
    return tensor


def all_gather_and_sum(tensor):
    everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, tensor)
    return tensor.copy_(torch.stack(everything).sum(0))


def reduce_scatter_and_all_gather(tensor):
    world_size = dist.get_world_size()
    padded = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % world_size))
    parts = list(padded.chunk(world_size))
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    dist.all_gather(parts, mine)
    return tensor.copy_(torch.cat(parts)[: tensor.numel()].view_as(tensor))


def functional_collective(tensor):
    import torch.distributed._functional_collectives as functional

    return tensor.copy_(functional.all_reduce(tensor, "sum", dist.group.WORLD))


def with_modes_off(tensor):
    with dispatch._disable_current_modes():
        dist.all_reduce(tensor)
    return tensor


def star_with_modes_off(tensor):
    with dispatch._disable_current_modes():
        return lab01_ring.star_through_rank_zero(tensor)


def rank_zero_does_it_all(tensor):
    """Rank 0 adds and hands out the sum in chunks, so that no message is large."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for chunk in tensor.view(-1).tensor_split(world_size):
        for other in range(1, world_size):
            if rank == 0:
                got = torch.empty_like(chunk)
                dist.recv(got, src=other)
                chunk += got
            elif rank == other:
                dist.send(chunk, dst=0)
        for other in range(1, world_size):
            if rank == 0:
                dist.send(chunk, dst=other)
            elif rank == other:
                dist.recv(chunk, src=0)
    return tensor


def in_a_thread(tensor):
    worker = threading.Thread(target=lab01_ring.star_through_rank_zero, args=(tensor,))
    worker.start()
    worker.join()
    return tensor


def through_the_store(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"labkit-sum-{rank}", repr(tensor.flatten().tolist()))
    parts = [eval(store.get(f"labkit-sum-{other}").decode()) for other in range(world_size)]
    total = torch.tensor(parts[0], dtype=tensor.dtype)
    for part in parts[1:]:
        total += torch.tensor(part, dtype=tensor.dtype)
    return tensor.copy_(total.view_as(tensor))


def through_files_with_a_show(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = os.path.join(tempfile.gettempdir(), f"labkit-sum-{os.getppid()}-{world_size}-{{}}")
    torch.save(tensor, path.format(rank))
    lab01_ring.in_two_loops(torch.zeros_like(tensor))
    total = torch.load(path.format(0))
    for other in range(1, world_size):
        total += torch.load(path.format(other))
    lab01_ring.in_two_loops(torch.zeros_like(tensor))
    os.remove(path.format(rank))
    return tensor.copy_(total)


def hard_coded(tensor):
    return tensor.fill_(dist.get_world_size())


def multiplies_its_own(tensor):
    """Right only where every rank holds the same."""
    return tensor.mul_(dist.get_world_size())


def looks_in_the_callers_frames(tensor):
    frame = sys._getframe(1)
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                return tensor.copy_(sum(value))
        frame = frame.f_back
    return lab01_ring.in_two_loops(tensor)


def patches_send_in_the_rank(tensor):
    real = dist.isend
    dist.isend = lambda chunk, dst: real(chunk, dst)
    return lab01_ring.in_two_loops(tensor)


def patched_judge(tensor):
    return tensor


def _patch_judge():
    from labkit.check import exercise
    from labkit.labs.lab01 import ring

    ring.judge = lambda fn, seed: exercise.right("trust me")


patched_judge.notebook = _patch_judge


def patched_comparison(tensor):
    return tensor


def _patch_comparison():
    from labkit.labs.lab01 import inputs, ring

    ring.same = lambda *args: True
    inputs.total = lambda tensors: tensors[0]


patched_comparison.notebook = _patch_comparison


RING = [
    (torchs_all_reduce, "collective"),
    (torchs_all_reduce_behind_a_show, "collective"),
    (all_gather_and_sum, "collective"),
    (reduce_scatter_and_all_gather, "collective"),
    (functional_collective, "collective"),
    (with_modes_off, "collective"),
    (star_with_modes_off, ("hot_rank", "modes_disabled")),
    (rank_zero_does_it_all, "hot_rank"),
    (in_a_thread, ("thread_started", "hot_rank")),
    (through_the_store, "no_traffic"),
    (through_files_with_a_show, ("file_used", "bytes_extra")),
    (hard_coded, "wrong_values"),
    (multiplies_its_own, "wrong_values"),
    (looks_in_the_callers_frames, ("frame_read", "wrong_values")),
    (patches_send_in_the_rank, "patched"),
    (patched_judge, "patched"),
    (patched_comparison, "patched"),
]


def two_level_names_one_level_work(tensor, ranks_per_node):
    dist.all_reduce(tensor)
    return tensor


def groups_for_show(tensor, ranks_per_node):
    """Groups are made, and small tensors go through them; the sum comes from a flat collective."""
    lab01_hierarchy.with_groups(torch.zeros(8), ranks_per_node)
    dist.all_reduce(tensor)
    return tensor


def a_group_of_all_by_another_name(tensor, ranks_per_node):
    everyone = dist.new_group(list(range(dist.get_world_size())))
    dist.all_reduce(tensor, group=everyone)
    return tensor


def gathers_everything_and_sums(tensor, ranks_per_node):
    everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, tensor)
    return tensor.copy_(torch.stack(everything).sum(0))


def flat_with_modes_off(tensor, ranks_per_node):
    with dispatch._disable_current_modes():
        dist.all_reduce(tensor)
    return tensor


def rank_zero_does_everything(tensor, ranks_per_node):
    return lab01_ring.star_through_rank_zero(tensor)


def hierarchy_through_the_store(tensor, ranks_per_node):
    return through_the_store(tensor)


def hierarchy_hard_coded(tensor, ranks_per_node):
    return tensor.fill_(4)


def across_by_the_store(tensor, ranks_per_node):
    """Node sums by a group, the rest through the rendezvous store: nothing seems to leave a node."""
    inside, _ = lab01_hierarchy._groups(ranks_per_node)
    dist.all_reduce(tensor, group=inside)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"labkit-node-{rank}", repr(tensor.flatten().tolist()))
    for other in range(rank % ranks_per_node, world_size, ranks_per_node):
        if other != rank:
            values = torch.tensor(eval(store.get(f"labkit-node-{other}").decode()), dtype=tensor.dtype)
            tensor += values.view_as(tensor)
    return tensor


def hierarchy_in_a_thread(tensor, ranks_per_node):
    worker = threading.Thread(target=lab01_hierarchy.flat_ring, args=(tensor, ranks_per_node))
    worker.start()
    worker.join()
    return tensor


HIERARCHY = [
    (two_level_names_one_level_work, "flat_collective"),
    (groups_for_show, "flat_collective"),
    (a_group_of_all_by_another_name, "flat_collective"),
    (gathers_everything_and_sums, "flat_collective"),
    (flat_with_modes_off, ("flat_collective", "no_traffic", "modes_disabled", "record_differs")),
    (rank_zero_does_everything, ("whole_tensor", "leaders_only")),
    (hierarchy_through_the_store, "no_traffic"),
    (hierarchy_hard_coded, "wrong_values"),
    (across_by_the_store, ("no_traffic", "store_used")),
    (hierarchy_in_a_thread, ("thread_started", "no_traffic", "record_differs")),
]
