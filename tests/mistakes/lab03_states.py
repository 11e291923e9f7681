"""Answers to exercise 3.1, `model_state_bytes`: wrong ones with the cause each must be told, right ones, cheats.

What is judged, and in which order, stands in `labkit.labs.lab03.states`.
"""

import os
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist

KEPT = {"sgd": 0, "momentum": 4, "lion": 4, "adam": 8, "adamw": 8, "adamw8bit": 2}


def right_one(num_parameters, precision, optimizer):
    width = 4 if precision == "fp32" else 2
    master = 0 if precision == "fp32" else 4
    return num_parameters * width, num_parameters * width, num_parameters * (master + KEPT[optimizer])


def two_bytes_two_bytes_and_two_moments(num_parameters, precision, optimizer):
    width = 4 if precision == "fp32" else 2
    return num_parameters * width, num_parameters * width, num_parameters * KEPT[optimizer]


def master_among_the_parameters(num_parameters, precision, optimizer):
    width = 4 if precision == "fp32" else 2
    weights = width + (0 if precision == "fp32" else 4)
    return num_parameters * weights, num_parameters * width, num_parameters * KEPT[optimizer]


def master_also_in_fp32(num_parameters, precision, optimizer):
    width = 4 if precision == "fp32" else 2
    return num_parameters * width, num_parameters * width, num_parameters * (4 + KEPT[optimizer])


def as_megatron_counts(num_parameters, precision, optimizer):
    weights, _, states = right_one(num_parameters, precision, optimizer)
    return weights, 4 * num_parameters, states


def as_deepspeeds_estimator_counts(num_parameters, precision, optimizer):
    weights, gradients, states = right_one(num_parameters, precision, optimizer)
    return weights, gradients + (0 if precision == "fp32" else 4 * num_parameters), states


def moments_as_wide_as_weights(num_parameters, precision, optimizer):
    width = 4 if precision == "fp32" else 2
    numbers = {"sgd": 0, "momentum": 1, "lion": 1, "adam": 2, "adamw": 2}.get(optimizer)
    own = 2 if numbers is None else numbers * width
    master = 0 if precision == "fp32" else 4
    return num_parameters * width, num_parameters * width, num_parameters * (master + own)


def sixteen_bytes_by_heart(num_parameters, precision, optimizer):
    return right_one(num_parameters, precision, "adamw")


def adam_with_one_moment(num_parameters, precision, optimizer):
    return right_one(
        num_parameters, precision, "momentum" if optimizer.startswith("adam") and "8" not in optimizer else optimizer
    )


def everything_in_four_bytes(num_parameters, precision, optimizer):
    return right_one(num_parameters, "fp32", optimizer)


def everything_as_in_bf16(num_parameters, precision, optimizer):
    return right_one(num_parameters, "bf16", optimizer)


def eight_bits_like_adam(num_parameters, precision, optimizer):
    return right_one(num_parameters, precision, optimizer.removesuffix("8bit"))


def of_one_parameter(num_parameters, precision, optimizer):
    return right_one(1, precision, optimizer)


def in_gigabytes(num_parameters, precision, optimizer):
    return tuple(each / 1e9 for each in right_one(num_parameters, precision, optimizer))


def in_gibibytes(num_parameters, precision, optimizer):
    return tuple(each / 2**30 for each in right_one(num_parameters, precision, optimizer))


def in_bits(num_parameters, precision, optimizer):
    return tuple(8 * each for each in right_one(num_parameters, precision, optimizer))


def optimizer_before_gradients(num_parameters, precision, optimizer):
    weights, gradients, states = right_one(num_parameters, precision, optimizer)
    return weights, states, gradients


def one_sum(num_parameters, precision, optimizer):
    return sum(right_one(num_parameters, precision, optimizer))


def as_a_dict(num_parameters, precision, optimizer):
    names = ("parameters", "gradients", "optimizer")
    return dict(zip(names, right_one(num_parameters, precision, optimizer), strict=True))


def only_the_optimizers_of_the_example(num_parameters, precision, optimizer):
    if optimizer in ("sgd", "adamw"):
        return right_one(num_parameters, precision, optimizer)


def fp16_like_fp32(num_parameters, precision, optimizer):
    return right_one(num_parameters, "bf16" if precision == "bf16" else "fp32", optimizer)


def momentum_like_sgd(num_parameters, precision, optimizer):
    return right_one(num_parameters, precision, "sgd" if optimizer == "momentum" else optimizer)


def forgets_gradients(num_parameters, precision, optimizer):
    weights, _, states = right_one(num_parameters, precision, optimizer)
    return weights, 0, states


WRONG = [
    (two_bytes_two_bytes_and_two_moments, "no_master"),
    (master_among_the_parameters, "master_elsewhere"),
    (master_also_in_fp32, "master_in_fp32"),
    (as_megatron_counts, "gradients_in_fp32"),
    (as_deepspeeds_estimator_counts, "gradient_copy"),
    (moments_as_wide_as_weights, "states_in_16_bits"),
    (sixteen_bytes_by_heart, "always_adam"),
    (adam_with_one_moment, "one_moment"),
    (everything_in_four_bytes, "like_fp32"),
    (everything_as_in_bf16, "like_bf16"),
    (eight_bits_like_adam, "eight_bits_ignored"),
    (of_one_parameter, "per_parameter"),
    (in_gigabytes, "in_gigabytes"),
    (in_gibibytes, "in_gibibytes"),
    (in_bits, "in_bits"),
    (optimizer_before_gradients, "another_order"),
    (one_sum, "total_only"),
    (as_a_dict, "not_three_numbers"),
    (only_the_optimizers_of_the_example, "returns_nothing"),
    (fp16_like_fp32, "wrong_precision"),
    (momentum_like_sgd, "wrong_optimizer"),
    (forgets_gradients, "wrong_bytes"),
]


def with_branches(num_parameters, precision, optimizer):
    """Counts numbers, then their widths."""
    if precision == "fp32":
        weights, gradients, master = 4, 4, 0
    else:
        weights, gradients, master = 2, 2, 4
    if optimizer == "sgd":
        own = 0
    elif optimizer in ("momentum", "lion"):
        own = 4
    elif optimizer == "adamw8bit":
        own = 2 * 1
    else:
        own = 2 * 4
    return [weights * num_parameters, gradients * num_parameters, (master + own) * num_parameters]


def by_torchs_dtypes(num_parameters, precision, optimizer):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    moments = {"sgd": [], "momentum": [torch.float32], "lion": [torch.float32], "adamw8bit": [torch.uint8] * 2}
    kept = list(moments.get(optimizer, [torch.float32] * 2))
    if dtype.itemsize < 4:
        kept.append(torch.float32)
    return tuple(num_parameters * size for size in (dtype.itemsize, dtype.itemsize, sum(k.itemsize for k in kept)))


def in_numpys_numbers(num_parameters, precision, optimizer):
    return tuple(np.int64(each) for each in right_one(num_parameters, precision, optimizer))


RIGHT = [right_one, with_branches, by_torchs_dtypes, in_numpys_numbers]


def the_example_by_heart(num_parameters, precision, optimizer):
    return 2 * 10**9, 2 * 10**9, 12 * 10**9


def asks_the_others(num_parameters, precision, optimizer):
    dist.all_reduce(torch.ones(1))
    return right_one(num_parameters, precision, optimizer)


def reads_the_callers_frames(num_parameters, precision, optimizer):
    frame = sys._getframe(1)
    while frame is not None and "due" not in frame.f_globals:
        frame = frame.f_back
    return frame.f_globals["due"]((num_parameters, precision, optimizer)) if frame else None


def asks_the_cost_model(num_parameters, precision, optimizer):
    from labkit.cost import states

    each = states.per_parameter("zero", precision)
    return (
        num_parameters * each.parameter,
        num_parameters * each.gradient,
        right_one(num_parameters, precision, optimizer)[2],
    )


def keeps_notes(num_parameters, precision, optimizer):
    with open(os.path.join(tempfile.gettempdir(), "labkit-notes.txt"), "a") as notes:
        notes.write(f"{num_parameters}\n")
    return right_one(num_parameters, precision, optimizer)


class Equal(float):
    """Equal to anything it is compared with, and never far from it."""

    def __eq__(self, other):
        return True

    def __sub__(self, other):
        return 0.0

    __hash__ = None


def answers_with_yes_men(num_parameters, precision, optimizer):
    return Equal(1), Equal(1), Equal(1)


def patches_abs(num_parameters, precision, optimizer):
    import builtins

    builtins.abs = lambda value: 0
    return right_one(num_parameters, precision, optimizer)


def patched_comparison(num_parameters, precision, optimizer):
    return 0, 0, 0


def _patch_comparison():
    from labkit.labs.lab03 import states

    states._same = lambda one, other: True


patched_comparison.notebook = _patch_comparison

CHEATS = [
    (the_example_by_heart, "hard_coded"),
    (asks_the_others, "communication"),
    (reads_the_callers_frames, "frame_read"),
    (asks_the_cost_model, "ready_made"),
    (keeps_notes, "file_used"),
    (answers_with_yes_men, "hard_coded"),
    (patches_abs, "patched"),
    (patched_comparison, "patched"),
]
