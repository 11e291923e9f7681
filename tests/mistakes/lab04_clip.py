"""Answers to exercise 4.4, `clip_grad_norm`: wrong ones with the cause each must be told, right ones, and cheats.

What is judged, and in which order, stands in `labkit.labs.lab04.clip`.
"""

import math
import sys

import torch
import torch.distributed as dist
from torch.utils import _python_dispatch as dispatch


def _squares(shards):
    return sum(shard.float().pow(2).sum() for shard in shards)


def _total(shards):
    total = _squares(shards)
    dist.all_reduce(total)
    return total.sqrt().item()


def _scale(shards, factor):
    for shard in shards:
        shard.mul_(factor)


# Right


def plain(shards, max_norm):
    total = sum(shard.float().pow(2).sum() for shard in shards)
    dist.all_reduce(total)
    norm = total.sqrt().item()
    if norm > max_norm:
        for shard in shards:
            shard.mul_(max_norm / norm)
    return norm


def with_torchs_own(shards, max_norm):
    norm = torch.stack([torch.linalg.vector_norm(shard, dtype=torch.float32) for shard in shards]).norm()
    squared = norm.square()
    dist.all_reduce(squared)
    norm = squared.sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if factor < 1:
        torch._foreach_mul_(shards, factor.item())
    return float(norm)


def in_double(shards, max_norm):
    total = torch.zeros(1, dtype=torch.float64, device=shards[0].device)
    for shard in shards:
        total += shard.double().square().sum()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    norm = math.sqrt(total)
    for shard in shards:
        shard *= min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
    return norm


def by_all_gather(shards, max_norm):
    mine = torch.cat([shard.flatten().float() for shard in shards]).norm().reshape(1)
    norms = [torch.zeros(1, device=mine.device) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, mine)
    norm = torch.cat(norms).norm().item()
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def waits_later(shards, max_norm):
    total = _squares(shards)
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    norm = float(total) ** 0.5
    factor = max_norm / norm if norm > max_norm else 1.0
    for shard in shards:
        shard.copy_(shard * factor)
    return norm


RIGHT = [plain, with_torchs_own, in_double, by_all_gather, waits_later]


# Wrong


def local_norm(shards, max_norm):
    norm = _squares(shards).sqrt().item()
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def returns_the_norm_and_scales_by_its_own(shards, max_norm):
    own = _squares(shards).sqrt().item()
    norm = _total(shards)
    if own > max_norm:
        _scale(shards, max_norm / own)
    return norm


def norms_added(shards, max_norm):
    norm = _squares(shards).sqrt()
    dist.all_reduce(norm)
    if norm > max_norm:
        _scale(shards, max_norm / norm.item())
    return norm.item()


def norms_of_tensors_added(shards, max_norm):
    total = sum(shard.float().norm() for shard in shards) ** 2
    dist.all_reduce(total)
    norm = total.sqrt().item()
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def largest_norm(shards, max_norm):
    norm = _squares(shards).sqrt()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    if norm > max_norm:
        _scale(shards, max_norm / norm.item())
    return norm.item()


def averages_squares(shards, max_norm):
    total = _squares(shards)
    dist.all_reduce(total)
    norm = (total / dist.get_world_size()).sqrt().item()
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def forgets_the_root(shards, max_norm):
    total = _squares(shards)
    dist.all_reduce(total)
    if total > max_norm:
        _scale(shards, max_norm / total.item())
    return total.item()


def scales_up(shards, max_norm):
    norm = _total(shards)
    if norm > 0:
        _scale(shards, max_norm / norm)
    return norm


def zero_over_zero(shards, max_norm):
    norm = _total(shards)
    factor = torch.tensor(max_norm) * 0 if norm == 0 else torch.tensor(max_norm)
    _scale(shards, min(1.0, (factor / torch.tensor(norm)).item()) if norm else (factor / torch.tensor(norm)).item())
    return norm


def eps_too_large(shards, max_norm):
    total = _squares(shards)
    dist.all_reduce(total)
    norm = (total + 1.0).sqrt().item()
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def makes_new_ones(shards, max_norm):
    norm = _total(shards)
    if norm > max_norm:
        for number, shard in enumerate(shards):
            shards[number] = shard * (max_norm / norm)
    return norm


def rebinds_a_name(shards, max_norm):
    norm = _total(shards)
    for shard in shards:
        if norm > max_norm:
            shard = shard * (max_norm / norm)
    return norm


def returns_the_norm_after(shards, max_norm):
    norm = _total(shards)
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return min(norm, max_norm)


def measures_after_clipping(shards, max_norm):
    norm = _total(shards)
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return _total(shards)


def returns_a_tensor(shards, max_norm):
    return torch.tensor(plain(shards, max_norm))


def returns_nothing(shards, max_norm):
    plain(shards, max_norm)


def returns_the_shards(shards, max_norm):
    plain(shards, max_norm)
    return shards


def in_the_gradients_own_dtype(shards, max_norm):
    total = sum(shard.pow(2).sum() for shard in shards)
    dist.all_reduce(total)
    norm = total.sqrt().item()
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def only_rank_zero_knows(shards, max_norm):
    total = _squares(shards)
    dist.reduce(total, dst=0)
    norm = total.sqrt().item()
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def asks_only_where_it_is_large(shards, max_norm):
    total = _squares(shards)
    if total.sqrt() > max_norm / 2:
        dist.all_reduce(total)
    norm = total.sqrt().item()
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def gathers_the_gradient(shards, max_norm):
    flat = torch.cat([shard.float().flatten() for shard in shards])
    longest = torch.tensor(flat.numel())
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = torch.zeros(int(longest))
    padded[: flat.numel()] = flat
    every = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(every, padded)
    norm = torch.cat(every).norm().item()
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def one_call_a_tensor(shards, max_norm):
    total = 0.0
    for shard in shards:
        square = shard.float().pow(2).sum()
        dist.all_reduce(square)
        total += square.item()
    norm = total**0.5
    again = torch.tensor(norm)
    dist.all_reduce(again, op=dist.ReduceOp.MAX)
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def one_call_a_shard(shards, max_norm):
    total = 0.0
    for shard in shards:
        square = shard.float().pow(2).sum()
        dist.all_reduce(square)
        total += square.item()
    norm = total**0.5
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def each_tensor_by_itself(shards, max_norm):
    norm = _total(shards)
    for shard in shards:
        own = shard.float().norm().item()
        if own > max_norm:
            shard.mul_(max_norm / own)
    return norm


def only_the_first(shards, max_norm):
    norm = _total(shards)
    if norm > max_norm:
        shards[0].mul_(max_norm / norm)
    return norm


def twice(shards, max_norm):
    norm = _total(shards)
    if norm > max_norm:
        _scale(shards, max_norm / norm)
        _scale(shards, max_norm / norm)
    return norm


def clamps_elements(shards, max_norm):
    norm = _total(shards)
    for shard in shards:
        shard.clamp_(-max_norm, max_norm)
    return norm


def drops_what_is_infinite(shards, max_norm):
    for shard in shards:
        shard.nan_to_num_(posinf=0.0, neginf=0.0)
    return plain(shards, max_norm)


def largest_element(shards, max_norm):
    norm = torch.stack([shard.float().abs().max() for shard in shards]).max()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    if norm > max_norm:
        _scale(shards, max_norm / norm.item())
    return norm.item()


def never_waits(shards, max_norm):
    total = _squares(shards)
    dist.all_reduce(total, async_op=True)
    norm = total.sqrt().item()
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


WRONG = [
    (never_waits, "not_waited"),
    (local_norm, "local_norm"),
    (returns_the_norm_and_scales_by_its_own, "local_factor"),
    (norms_added, "norms_added"),
    (norms_of_tensors_added, "norms_added"),
    (largest_norm, "largest_norm"),
    (averages_squares, "mean_of_squares"),
    (forgets_the_root, "not_rooted"),
    (scales_up, "scaled_up"),
    (zero_over_zero, "zero_norm"),
    (eps_too_large, ("nearly_right", "wrong_norm")),
    (makes_new_ones, "not_scaled"),
    (rebinds_a_name, "not_scaled"),
    (returns_the_norm_after, "after_clipping"),
    (measures_after_clipping, "after_clipping"),
    (returns_a_tensor, "not_a_float"),
    (returns_nothing, "returns_nothing"),
    (returns_the_shards, "not_a_float"),
    (in_the_gradients_own_dtype, "overflow"),
    (only_rank_zero_knows, "ranks_differ"),
    (asks_only_where_it_is_large, ("calls_differ", "ranks_differ", "local_norm", "wrong_norm")),
    (gathers_the_gradient, "shards_sent"),
    (one_call_a_tensor, "many_calls"),
    (one_call_a_shard, "many_calls"),
    (each_tensor_by_itself, ("each_tensor", "not_scaled")),
    (only_the_first, "some_left"),
    (twice, "scaled_twice"),
    (clamps_elements, ("wrong_factor", "not_scaled")),
    (drops_what_is_infinite, "infinity_lost"),
    (largest_element, "largest_element"),
]


# Cheats


def through_the_store(shards, max_norm):
    store = dist.distributed_c10d._get_default_store()
    through_the_store.calls = getattr(through_the_store, "calls", 0) + 1
    key = f"labkit-clip-{through_the_store.calls}-"
    store.set(f"{key}{dist.get_rank()}", repr(_squares(shards).item()))
    parts = [float(store.get(f"{key}{rank}").decode()) for rank in range(dist.get_world_size())]
    norm = math.sqrt(sum(parts))
    if norm > max_norm:
        _scale(shards, max_norm / norm)
    return norm


def with_modes_off(shards, max_norm):
    with dispatch._disable_current_modes():
        return plain(shards, max_norm)


def patches_all_reduce(shards, max_norm):
    real = dist.all_reduce
    dist.all_reduce = lambda tensor: real(tensor)
    return plain(shards, max_norm)


def looks_in_the_callers_frames(shards, max_norm):
    frame = sys._getframe(1)
    norm = plain(shards, max_norm)
    return norm if frame is not None else 0.0


def hard_coded(shards, max_norm):
    return 13.0


def patched_judge(shards, max_norm):
    return local_norm(shards, max_norm)


def _patch_judge():
    from labkit.labs.lab04 import clip_told

    clip_told.near = lambda got, due, within: True


patched_judge.notebook = _patch_judge

CHEATS = [
    (through_the_store, ("store_used", "no_traffic")),
    (with_modes_off, ("modes_disabled", "record_differs", "no_traffic")),
    (patches_all_reduce, "patched"),
    (looks_in_the_callers_frames, "frame_read"),
    (hard_coded, ("wrong_norm", "ranks_differ")),
    (patched_judge, "patched"),
]
