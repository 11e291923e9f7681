"""Answers to exercise 2.4, `shard_sampler`: wrong ones with the cause each must be told, right ones, cheats.

What is judged, and in which order, stands in `labkit.labs.lab02.sampler`.
"""

import json
import math
import os
import random
import sys
import tempfile
import threading

import lab02_sampler_more as more
import numpy as np
import torch
import torch.distributed as dist


def _order(num_samples, seed, epoch):
    order = list(range(num_samples))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def _in_steps(order, batch_size, rank, world_size, weigh=None):
    """Full steps of an order, each dealt to the ranks in blocks."""
    full, steps = batch_size * world_size, []
    for start in range(0, len(order), full):
        step = order[start : start + full]
        mine = step[rank * batch_size : (rank + 1) * batch_size]
        weight = len(mine) / len(step) if weigh is None else weigh(mine, step)
        steps.append((mine, weight))
    return steps


def right_one(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return _in_steps(_order(num_samples, seed, epoch), batch_size, rank, world_size)


def like_distributed_sampler(num_samples, batch_size, rank, world_size, epoch, seed=0):
    """Repeats the first samples until every rank has as many."""
    order = _order(num_samples, seed, epoch)
    while order and len(order) % world_size:
        order.append(order[len(order) - num_samples])
    mine = order[rank::world_size]
    return [(mine[i : i + batch_size], 1 / world_size) for i in range(0, len(mine), batch_size)]


def torchs_distributed_sampler(num_samples, batch_size, rank, world_size, epoch, seed=0):
    if not num_samples:
        return []
    sampler = torch.utils.data.DistributedSampler(range(num_samples), world_size, rank, seed=seed)
    sampler.set_epoch(epoch)
    mine = list(sampler)
    return [(mine[i : i + batch_size], 1 / world_size) for i in range(0, len(mine), batch_size)]


def drops_the_tail(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = _order(num_samples, seed, epoch)
    return _in_steps(
        order[: num_samples // (batch_size * world_size) * batch_size * world_size], batch_size, rank, world_size
    )


def drops_what_does_not_divide_by_ranks(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = _order(num_samples, seed, epoch)
    return _in_steps(order[: num_samples // world_size * world_size], batch_size, rank, world_size)


def forgets_set_epoch(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return right_one(num_samples, batch_size, rank, world_size, 0, seed)


def forgets_the_seed(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return right_one(num_samples, batch_size, rank, world_size, epoch)


def seed_times_epoch(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return right_one(num_samples, batch_size, rank, world_size, 0, seed * epoch)


def from_the_global_generator(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = torch.randperm(num_samples).tolist()
    return _in_steps(order, batch_size, rank, world_size)


def shuffles_with_the_global_random(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = list(range(num_samples))
    random.shuffle(order)
    return _in_steps(order, batch_size, rank, world_size)


def seeds_torchs_global_generator(num_samples, batch_size, rank, world_size, epoch, seed=0):
    torch.manual_seed(seed + epoch)
    return _in_steps(torch.randperm(num_samples).tolist(), batch_size, rank, world_size)


def seeds_pythons_global_generator(num_samples, batch_size, rank, world_size, epoch, seed=0):
    random.seed(seed + 1000 * epoch)
    order = list(range(num_samples))
    random.shuffle(order)
    return _in_steps(order, batch_size, rank, world_size)


def seeds_numpys_global_generator(num_samples, batch_size, rank, world_size, epoch, seed=0):
    np.random.seed(seed + 1000 * epoch)
    return _in_steps(np.random.permutation(num_samples).tolist(), batch_size, rank, world_size)


def every_rank_shuffles_its_own_way(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return _in_steps(_order(num_samples, seed + rank, epoch), batch_size, rank, world_size)


def contiguous_blocks_rounded_up(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order, block = _order(num_samples, seed, epoch), math.ceil(num_samples / world_size)
    mine = order[rank * block : (rank + 1) * block]
    steps = [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]
    return [(step, 1 / world_size) for step in steps]


def contiguous_blocks_filled_with_empty_steps(num_samples, batch_size, rank, world_size, epoch, seed=0):
    """The last rank gets the rest, so its steps run short in the middle of the epoch."""
    order, block = _order(num_samples, seed, epoch), num_samples // world_size
    ends = [*(block * r for r in range(world_size)), num_samples]
    blocks = [order[ends[r] : ends[r + 1]] for r in range(world_size)]
    count = max(math.ceil(len(each) / batch_size) for each in blocks)
    found = []
    for i in range(count):
        step = [each[i * batch_size : (i + 1) * batch_size] for each in blocks]
        found.append((step[rank], len(step[rank]) / sum(map(len, step))))
    return found


def leaves_out_empty_steps(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return [step for step in right_one(num_samples, batch_size, rank, world_size, epoch, seed) if step[0]]


def weighs_all_ranks_alike(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return _in_steps(_order(num_samples, seed, epoch), batch_size, rank, world_size, lambda mine, step: 1 / world_size)


def alike_but_for_empty_ranks(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return [
        (mine, 1 / world_size if mine else 0.0)
        for mine, _ in right_one(num_samples, batch_size, rank, world_size, epoch, seed)
    ]


def weighs_by_the_full_step(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = _order(num_samples, seed, epoch)
    return _in_steps(order, batch_size, rank, world_size, lambda mine, step: len(mine) / (batch_size * world_size))


def weighs_by_its_own_batch(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = _order(num_samples, seed, epoch)
    return _in_steps(order, batch_size, rank, world_size, lambda mine, step: len(mine) / batch_size)


def weighs_one(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = _order(num_samples, seed, epoch)
    return _in_steps(order, batch_size, rank, world_size, lambda mine, step: 1.0 if mine else 0.0)


def weighs_by_counts(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = _order(num_samples, seed, epoch)
    return _in_steps(order, batch_size, rank, world_size, lambda mine, step: float(len(mine)))


def weights_for_ddps_mean(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = _order(num_samples, seed, epoch)
    return _in_steps(order, batch_size, rank, world_size, lambda mine, step: len(mine) * world_size / len(step))


def weighs_by_the_epoch(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = _order(num_samples, seed, epoch)
    return _in_steps(order, batch_size, rank, world_size, lambda mine, step: len(mine) / num_samples)


def empty_ranks_weigh_the_most(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = _order(num_samples, seed, epoch)
    return _in_steps(
        order, batch_size, rank, world_size, lambda mine, step: 1 - len(mine) / len(step) if len(step) > 1 else 1.0
    )


def takes_the_batch_for_all_ranks(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order, steps = _order(num_samples, seed, epoch), []
    for start in range(0, num_samples, batch_size):
        step = order[start : start + batch_size]
        mine = step[rank::world_size]
        steps.append((mine, len(mine) / len(step)))
    return steps


def gives_whole_steps_to_ranks_in_turn(num_samples, batch_size, rank, world_size, epoch, seed=0):
    """Step k belongs to rank k % world_size alone."""
    order = _order(num_samples, seed, epoch)
    steps = [order[i : i + batch_size] for i in range(0, num_samples, batch_size)]
    return [(step, 1.0) if k % world_size == rank else ([], 0.0) for k, step in enumerate(steps)]


def in_the_order_of_the_file(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return _in_steps(list(range(num_samples)), batch_size, rank, world_size)


def shuffles_within_a_step(num_samples, batch_size, rank, world_size, epoch, seed=0):
    full, order = batch_size * world_size, []
    for start in range(0, num_samples, full):
        step = list(range(start, min(start + full, num_samples)))
        random.Random(f"{seed} {epoch} {start}").shuffle(step)
        order += step
    return _in_steps(order, batch_size, rank, world_size)


def everyone_has_everything(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = _order(num_samples, seed, epoch)
    return [(order[i : i + batch_size], 1 / world_size) for i in range(0, num_samples, batch_size)]


def draws_with_replacement(num_samples, batch_size, rank, world_size, epoch, seed=0):
    drawn = random.Random(f"{seed} {epoch}")
    order = [drawn.randrange(num_samples) for _ in range(num_samples)]
    return _in_steps(order, batch_size, rank, world_size)


def counts_samples_from_one(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = [index + 1 for index in _order(num_samples, seed, epoch)]
    return _in_steps(order, batch_size, rank, world_size)


def always_one_step_more(num_samples, batch_size, rank, world_size, epoch, seed=0):
    full, found = batch_size * world_size, right_one(num_samples, batch_size, rank, world_size, epoch, seed)
    return found if num_samples % full else [*found, ([], 0.0)]


def the_small_step_first(num_samples, batch_size, rank, world_size, epoch, seed=0):
    found = right_one(num_samples, batch_size, rank, world_size, epoch, seed)
    return [*found[-1:], *found[:-1]]


def doubles_the_last_batch(num_samples, batch_size, rank, world_size, epoch, seed=0):
    """What is left over goes to rank 0's last full batch, so that there is no small step."""
    full = batch_size * world_size
    order, kept = _order(num_samples, seed, epoch), num_samples // full * full
    if not kept:
        return _in_steps(order, batch_size, rank, world_size)
    steps = _in_steps(order[:kept], batch_size, rank, world_size)
    if kept < num_samples:
        size = full + num_samples - kept
        mine = steps[-1][0] + (order[kept:] if rank == 0 else [])
        steps[-1] = (mine, len(mine) / size)
    return steps


def asks_the_group(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return right_one(num_samples, batch_size, dist.get_rank(), dist.get_world_size(), epoch, seed)


def samples_without_steps(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return _order(num_samples, seed, epoch)[rank::world_size]


def steps_without_weights(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return [mine for mine, _ in right_one(num_samples, batch_size, rank, world_size, epoch, seed)]


def indices_as_tensors(num_samples, batch_size, rank, world_size, epoch, seed=0):
    steps = right_one(num_samples, batch_size, rank, world_size, epoch, seed)
    return [(torch.tensor(mine, dtype=torch.int64), weight) for mine, weight in steps]


def a_generator_of_steps(num_samples, batch_size, rank, world_size, epoch, seed=0):
    yield from right_one(num_samples, batch_size, rank, world_size, epoch, seed)


def a_generator_expression(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return iter(right_one(num_samples, batch_size, rank, world_size, epoch, seed))


def divides_by_no_samples(num_samples, batch_size, rank, world_size, epoch, seed=0):
    epochs_per_step = batch_size * world_size / num_samples
    steps = right_one(num_samples, batch_size, rank, world_size, epoch, seed)
    return steps if epochs_per_step else []


def no_default_for_the_seed(num_samples, batch_size, rank, world_size, epoch, seed):
    return right_one(num_samples, batch_size, rank, world_size, epoch, seed)


def another_default_for_the_seed(num_samples, batch_size, rank, world_size, epoch, seed=42):
    return right_one(num_samples, batch_size, rank, world_size, epoch, seed)


WRONG = [
    (like_distributed_sampler, "padding"),
    (torchs_distributed_sampler, "padding"),
    (drops_the_tail, "tail_dropped"),
    (drops_what_does_not_divide_by_ranks, "tail_dropped"),
    (forgets_set_epoch, "epoch_ignored"),
    (forgets_the_seed, "seed_ignored"),
    (seed_times_epoch, "epoch_ignored"),
    (from_the_global_generator, "not_repeatable"),
    (shuffles_with_the_global_random, "not_repeatable"),
    (seeds_torchs_global_generator, "global_generator"),
    (seeds_pythons_global_generator, "global_generator"),
    (seeds_numpys_global_generator, "global_generator"),
    (every_rank_shuffles_its_own_way, "order_per_rank"),
    (contiguous_blocks_rounded_up, ("steps_differ", "not_full")),
    (contiguous_blocks_filled_with_empty_steps, ("steps_differ", "not_full")),
    (leaves_out_empty_steps, "steps_differ"),
    (weighs_all_ranks_alike, "equal_weights"),
    (alike_but_for_empty_ranks, "equal_among_present"),
    (weighs_by_the_full_step, "share_of_a_full_step"),
    (weighs_by_its_own_batch, "share_of_own_batch"),
    (weighs_one, "weight_one"),
    (weighs_by_counts, "weight_is_count"),
    (weights_for_ddps_mean, "times_world_size"),
    (weighs_by_the_epoch, "share_of_epoch"),
    (empty_ranks_weigh_the_most, "wrong_weight"),
    (takes_the_batch_for_all_ranks, "batch_size_is_global"),
    (gives_whole_steps_to_ranks_in_turn, "batch_size_is_global"),
    (in_the_order_of_the_file, "not_shuffled"),
    (shuffles_within_a_step, "not_shuffled"),
    (everyone_has_everything, "replicated"),
    (draws_with_replacement, "drawn_again"),
    (counts_samples_from_one, "past_the_end"),
    (always_one_step_more, "extra_step"),
    (the_small_step_first, "not_full"),
    (doubles_the_last_batch, "batch_too_large"),
    (asks_the_group, "ignores_arguments"),
    (samples_without_steps, "no_steps"),
    (steps_without_weights, "no_weight"),
    (indices_as_tensors, "tensor_indices"),
    (a_generator_of_steps, "generator"),
    (a_generator_expression, "not_a_list"),
    (divides_by_no_samples, "raised"),
    (no_default_for_the_seed, "wrong_signature"),
    (another_default_for_the_seed, "not_repeatable"),
    *more.WRONG,
]


def strided_with_a_torch_generator(num_samples, batch_size, rank, world_size, epoch, seed=0):
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(num_samples, generator=generator).tolist()
    mine, full = order[rank::world_size], batch_size * world_size
    steps = []
    for step in range(math.ceil(num_samples / full)):
        indices = mine[step * batch_size : (step + 1) * batch_size]
        steps.append((indices, len(indices) / min(full, num_samples - step * full)))
    return steps


def balanced_blocks_of_numpys_permutation(num_samples, batch_size, rank, world_size, epoch, seed=0):
    """Every rank's block is cut into steps; a rank without a last one gets an empty one."""
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    blocks = np.array_split(order, world_size)
    found = []
    for step in range(-(-num_samples // (batch_size * world_size))):
        parts = [block[step * batch_size : (step + 1) * batch_size] for block in blocks]
        found.append((parts[rank], len(parts[rank]) / sum(len(part) for part in parts)))
    return found


def last_step_shared_evenly(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = _order(num_samples, seed ^ epoch, seed + epoch)
    full = batch_size * world_size
    steps = []
    for start in range(0, num_samples, full):
        step = order[start : start + full]
        base, extra = divmod(len(step), world_size)
        first = rank * base + min(rank, extra)
        indices = step[first : first + base + (rank < extra)]
        steps.append((indices, len(indices) / len(step)))
    return steps


def randperm_through_numpy(num_samples, batch_size, rank, world_size, epoch, seed=0):
    """seed 0 in epoch 1 is seed 1 in epoch 0, which harms nobody. Indices are numpy's integers."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order = torch.randperm(num_samples, generator=generator).numpy()
    return [(list(mine), weight) for mine, weight in _in_steps(order, batch_size, rank, world_size)]


def gives_the_global_generator_back(num_samples, batch_size, rank, world_size, epoch, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + epoch)
        order = torch.randperm(num_samples).tolist()
    return _in_steps(order, batch_size, rank, world_size)


def every_rank_keeps_its_shard(num_samples, batch_size, rank, world_size, epoch, seed=0):
    """The same samples in every epoch, shuffled within the rank: what data sharded over files allows."""
    mine = list(range(rank, num_samples, world_size))
    random.Random(hash((seed, epoch, rank))).shuffle(mine)
    full, steps = batch_size * world_size, []
    for step in range((num_samples + full - 1) // full):
        size = min(full, num_samples - step * full)
        indices = tuple(mine[step * batch_size : (step + 1) * batch_size])
        steps.append((indices, np.float32(len(indices) / size)))
    return tuple(steps)


RIGHT = [
    right_one,
    strided_with_a_torch_generator,
    balanced_blocks_of_numpys_permutation,
    last_step_shared_evenly,
    randperm_through_numpy,
    gives_the_global_generator_back,
    every_rank_keeps_its_shard,
    *more.RIGHT,
]


def rank_zero_tells_the_order(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = torch.tensor(_order(num_samples, seed, epoch), dtype=torch.int64)
    dist.broadcast(order, src=0)
    return _in_steps(order.tolist(), batch_size, rank, world_size)


def a_barrier_for_safety(num_samples, batch_size, rank, world_size, epoch, seed=0):
    dist.barrier()
    return right_one(num_samples, batch_size, rank, world_size, epoch, seed)


def one_answer_by_heart(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return [([rank * 2, rank * 2 + 1], 0.25)]


def keeps_the_order_in_a_file(num_samples, batch_size, rank, world_size, epoch, seed=0):
    path = os.path.join(tempfile.gettempdir(), f"labkit-order-{os.getpid()}.json")
    with open(path, "w") as notes:
        json.dump(_order(num_samples, seed, epoch), notes)
    with open(path) as notes:
        order = json.load(notes)
    os.remove(path)
    return _in_steps(order, batch_size, rank, world_size)


def reads_the_questions_of_the_judge(num_samples, batch_size, rank, world_size, epoch, seed=0):
    frame = sys._getframe(1)
    while frame is not None and "questions" not in frame.f_locals:
        frame = frame.f_back
    return right_one(num_samples, batch_size, rank, world_size, epoch, seed)


def shuffles_in_a_thread(num_samples, batch_size, rank, world_size, epoch, seed=0):
    found = []
    thread = threading.Thread(target=lambda: found.append(_order(num_samples, seed, epoch)))
    thread.start()
    thread.join()
    return _in_steps(found[0], batch_size, rank, world_size)


class Anything(int):
    """Equal to any sample."""

    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def samples_that_are_anything(num_samples, batch_size, rank, world_size, epoch, seed=0):
    steps = _in_steps(list(range(num_samples)), batch_size, rank, world_size)
    return [([Anything(0) for _ in mine], weight) for mine, weight in steps]


CHEATS = [
    (rank_zero_tells_the_order, "communication"),
    (a_barrier_for_safety, "communication"),
    (one_answer_by_heart, ("order_per_rank", "past_the_end", "tail_dropped", "missing")),
    (keeps_the_order_in_a_file, "file_used"),
    (reads_the_questions_of_the_judge, "frame_read"),
    (shuffles_in_a_thread, "thread_started"),
    (samples_that_are_anything, "steps_repeated"),
    *more.CHEATS,
]
