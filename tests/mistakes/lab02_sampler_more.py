"""More answers to exercise 2.4, `shard_sampler`: slices that start elsewhere, shuffles that are none, odd types.

Right ones, wrong ones and cheats with the cause each must be told. The most common ones stand in `lab02_sampler`.
"""

import array
import fractions
import hashlib
import random
from collections import namedtuple

import numpy as np


def _order(num_samples, seed, epoch):
    order = list(range(num_samples))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def _in_steps(order, batch_size, rank, world_size):
    full, steps = batch_size * world_size, []
    for start in range(0, len(order), full):
        step = order[start : start + full]
        mine = step[rank * batch_size : (rank + 1) * batch_size]
        steps.append((mine, len(mine) / len(step)))
    return steps


def _right(num_samples, batch_size, rank, world_size, epoch, seed):
    return _in_steps(_order(num_samples, seed, epoch), batch_size, rank, world_size)


# Slices


def forgets_the_start(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order, found = _order(num_samples, seed, epoch), []
    for _ in range(0, num_samples, batch_size * world_size):
        found.append((order[rank * batch_size : (rank + 1) * batch_size], 1 / world_size))
    return found


def forgets_to_multiply_by_the_batch(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order, full, found = _order(num_samples, seed, epoch), batch_size * world_size, []
    for start in range(0, num_samples, full):
        step = order[start : start + full]
        mine = step[rank : rank + batch_size]
        found.append((mine, len(mine) / len(step)))
    return found


# Orders


def seed_from_the_hash_of_a_text(num_samples, batch_size, rank, world_size, epoch, seed=0):
    """Python salts it: another order in each process, unless PYTHONHASHSEED is set."""
    order = list(range(num_samples))
    random.Random(hash(f"{seed}-{epoch}")).shuffle(order)
    return _in_steps(order, batch_size, rank, world_size)


def hash_of_a_pair_with_a_text(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = list(range(num_samples))
    random.Random(hash(("shuffle", seed, epoch))).shuffle(order)
    return _in_steps(order, batch_size, rank, world_size)


def turns_the_order(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order = [(index + 7 * seed + epoch + 1) % num_samples for index in range(num_samples)]
    return _in_steps(order, batch_size, rank, world_size)


def swaps_two_samples(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order, half = list(range(num_samples)), num_samples // 2
    if half:
        other = (seed * 31 + epoch) % half + half
        order[0], order[other] = order[other], order[0]
    return _in_steps(order, batch_size, rank, world_size)


def shuffles_steps_not_samples(num_samples, batch_size, rank, world_size, epoch, seed=0):
    full = batch_size * world_size
    order = []
    for step in _order(num_samples // full, seed, epoch):
        order += range(step * full, (step + 1) * full)
    order += range(num_samples // full * full, num_samples)
    return _in_steps(order, batch_size, rank, world_size)


def from_the_end(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return _in_steps(list(range(num_samples))[::-1], batch_size, rank, world_size)


# Types and weights


def batches_and_weights_apart(num_samples, batch_size, rank, world_size, epoch, seed=0):
    steps = _right(num_samples, batch_size, rank, world_size, epoch, seed)
    return [mine for mine, _ in steps], [weight for _, weight in steps]


def dicts(num_samples, batch_size, rank, world_size, epoch, seed=0):
    steps = _right(num_samples, batch_size, rank, world_size, epoch, seed)
    return [{"indices": mine, "weight": weight} for mine, weight in steps]


def numbered_steps(num_samples, batch_size, rank, world_size, epoch, seed=0):
    steps = _right(num_samples, batch_size, rank, world_size, epoch, seed)
    return [(number, mine, weight) for number, (mine, weight) in enumerate(steps)]


def swapped_pairs(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return [(weight, mine) for mine, weight in _right(num_samples, batch_size, rank, world_size, epoch, seed)]


def nan_where_there_is_nothing(num_samples, batch_size, rank, world_size, epoch, seed=0):
    steps = _right(num_samples, batch_size, rank, world_size, epoch, seed)
    return [(mine, weight if mine else float("nan")) for mine, weight in steps]


def nan_in_a_step_too_many(num_samples, batch_size, rank, world_size, epoch, seed=0):
    order, full, found = _order(num_samples, seed, epoch), batch_size * world_size, []
    with np.errstate(invalid="ignore"):
        for start in range(0, num_samples + 1, full):
            step = order[start : start + full]
            mine = step[rank * batch_size : (rank + 1) * batch_size]
            found.append((mine, float(np.float64(len(mine)) / np.float64(len(step)))))
    return found


def complex_weights(num_samples, batch_size, rank, world_size, epoch, seed=0):
    steps = _right(num_samples, batch_size, rank, world_size, epoch, seed)
    return [(mine, np.complex64(weight)) for mine, weight in steps]


def weights_past_any_float(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return [(mine, 10**400) for mine, _ in _right(num_samples, batch_size, rank, world_size, epoch, seed)]


def an_index_of_5000_digits(num_samples, batch_size, rank, world_size, epoch, seed=0):
    steps = _right(num_samples, batch_size, rank, world_size, epoch, seed)
    return [([*mine, 10**5000], weight) for mine, weight in steps]


def an_array_without_a_length(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return [(np.array(3), weight) for _, weight in _right(num_samples, batch_size, rank, world_size, epoch, seed)]


def a_million_steps(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return [([], 0.0)] * 1_000_000


def a_step_without_end(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return [(range(10**12), 1.0)]


def a_step_past_any_length(num_samples, batch_size, rank, world_size, epoch, seed=0):
    return [(range(10**30), 1.0)]


WRONG = [
    (forgets_the_start, "steps_repeated"),
    (forgets_to_multiply_by_the_batch, "overlap"),
    (seed_from_the_hash_of_a_text, "text_hashed"),
    (hash_of_a_pair_with_a_text, "text_hashed"),
    (shuffles_steps_not_samples, ("hardly_shuffled", "not_shuffled")),
    (from_the_end, "hardly_shuffled"),
    (batches_and_weights_apart, "wrong_step"),
    (dicts, "wrong_step"),
    (numbered_steps, "wrong_step"),
    (swapped_pairs, "wrong_step"),
    (nan_where_there_is_nothing, "not_finite"),
    (nan_in_a_step_too_many, "not_finite"),
    (complex_weights, "wrong_step"),
    (weights_past_any_float, "not_finite"),
    (an_index_of_5000_digits, "past_the_end"),
    (an_array_without_a_length, "wrong_step"),
    (a_million_steps, "too_many"),
    (a_step_without_end, "too_many"),
    (a_step_past_any_length, "too_many"),
]


# Right ones

Step = namedtuple("Step", "indices weight")


def named_steps_of_fractions(num_samples, batch_size, rank, world_size, epoch, seed=0):
    full, order = batch_size * world_size, _order(num_samples, seed, epoch)
    found = []
    for start in range(0, num_samples, full):
        step = order[start : start + full]
        mine = array.array("q", step[rank::world_size])
        found.append(Step(mine, fractions.Fraction(len(mine), len(step))))
    return found


def sorted_by_a_digest(num_samples, batch_size, rank, world_size, epoch, seed=0):
    """hashlib has no salt. Ranks take turns in being first."""

    def digest(index):
        return hashlib.sha256(f"{seed}/{epoch}/{index}".encode()).digest()

    order, full = sorted(range(num_samples), key=digest), batch_size * world_size
    found = []
    for number, start in enumerate(range(0, num_samples, full)):
        step, place = order[start : start + full], (rank + number) % world_size
        mine = step[place * batch_size : (place + 1) * batch_size]
        found.append([sorted(mine), len(mine) / len(step)])
    return found


def hashes_numbers_and_a_text_in_vain(num_samples, batch_size, rank, world_size, epoch, seed=0):
    """Of the text's hash nothing follows."""
    named = {hash("order"): _order(num_samples, hash((seed, epoch)), 0)}
    return _in_steps(named[hash("order")], batch_size, rank, world_size)


RIGHT = [named_steps_of_fractions, sorted_by_a_digest, hashes_numbers_and_a_text_in_vain]

CHEATS = [
    (turns_the_order, "hardly_shuffled"),
    (swaps_two_samples, "hardly_shuffled"),
]
