"""Answers to exercise 7.1, `split_stages`: wrong ones with the cause each must be told, right ones, cheats."""

import math

import numpy as np
import torch.distributed as dist


def one_by_one(layers, num_stages, embedding, head):
    """Each layer goes to the stage that is fastest so far."""
    counts = [1] * num_stages
    times = [1.0] * num_stages
    times[0] += embedding
    times[-1] += head
    for _ in range(layers - num_stages):
        stage = times.index(min(times))
        counts[stage] += 1
        times[stage] += 1
    return counts


def by_table(layers, num_stages, embedding, head):
    """Dynamic programming over stages from the left."""
    table = {0: (0.0, [])}
    for stage in range(num_stages):
        more = embedding * (stage == 0) + head * (stage == num_stages - 1)
        after = {}
        for done, (slowest, counts) in table.items():
            for count in range(1, layers - done + 1):
                found = max(slowest, count + more), [*counts, count]
                if done + count not in after or found < after[done + count]:
                    after[done + count] = found
        table = after
    return table[layers][1]


def by_numpy(layers, num_stages, embedding, head):
    times = np.ones(num_stages)
    times[0] += embedding
    times[-1] += head
    counts = np.ones(num_stages, dtype=int)
    for _ in range(layers - num_stages):
        stage = times.argmin()
        counts[stage] += 1
        times[stage] += 1
    return counts


def nothing_returned(layers, num_stages, embedding, head):
    one_by_one(layers, num_stages, embedding, head)


def rounded_to_nearest(layers, num_stages, embedding, head):
    return one_by_one(layers, num_stages, round(embedding), round(head))


def even(layers, num_stages, embedding, head):
    return [layers // num_stages + (stage < layers % num_stages) for stage in range(num_stages)]


def no_head(layers, num_stages, embedding, head):
    return one_by_one(layers, num_stages, embedding, 0)


def no_embedding(layers, num_stages, embedding, head):
    return one_by_one(layers, num_stages, 0, head)


def swapped(layers, num_stages, embedding, head):
    return one_by_one(layers, num_stages, head, embedding)


def rounded_up(layers, num_stages, embedding, head):
    return one_by_one(layers, num_stages, math.ceil(embedding), math.ceil(head))


def rest_to_the_last(layers, num_stages, embedding, head):
    return [layers // num_stages] * (num_stages - 1) + [layers - layers // num_stages * (num_stages - 1)]


def rest_is_lost(layers, num_stages, embedding, head):
    return [layers // num_stages] * num_stages


def boundaries(layers, num_stages, embedding, head):
    found, begin = [], 0
    for count in one_by_one(layers, num_stages, embedding, head):
        found.append((begin, begin + count))
        begin += count
    return found


def no_layer_with_the_head(layers, num_stages, embedding, head):
    if num_stages == 1:
        return [layers]
    return [*even(layers, num_stages - 1, embedding, head), 0]


def ends_as_stages(layers, num_stages, embedding, head):
    return [1, *one_by_one(layers - 1, num_stages, embedding, head)]


def the_example(layers, num_stages, embedding, head):
    return [4, 5, 5, 2]


def asks_rank_0(layers, num_stages, embedding, head):
    found = [one_by_one(layers, num_stages, embedding, head) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    return found[0]


def by_labkit(layers, num_stages, embedding, head):
    from labkit.cost.shapes import stage_layers

    return list(stage_layers(layers, num_stages))


WRONG = [
    (even, "ends_forgotten"),
    (no_head, "head_forgotten"),
    (no_embedding, "embedding_forgotten"),
    (swapped, "ends_swapped"),
    (rounded_up, "rounded"),
    (rounded_to_nearest, "rounded"),
    (nothing_returned, "wrong_type"),
    (rest_to_the_last, "not_balanced"),
    (rest_is_lost, "layers_lost"),
    (boundaries, "wrong_type"),
    (no_layer_with_the_head, "empty_stage"),
    (ends_as_stages, "wrong_count"),
]
RIGHT = [one_by_one, by_table, by_numpy]
CHEATS = [
    (the_example, "hard_coded"),
    (asks_rank_0, "communication"),
    (by_labkit, "ready_made"),
]
