"""Judge of exercise 2.2, `BucketedDDP`: gradients averaged in buckets, while backward goes on.

Values: every rank begins with rank 0's parameters and buffers, and gradients, losses and parameters are those of serial
training on the batches of all ranks. Evidence, from the record of each step of a Llama (`cases.LLAMA`) on 4 ranks:
all_reduces of at most bucket_bytes, hardly more than the bytes fill; every gradient sent once; issued in backward, with
backward's own FLOPs until they are waited for; waits only after the last was issued; and, replayed on 4 T4 over PCIe 3
in buckets of 256 KiB, at most 25 % of the exposed communication of the naive way, which is one blocking all_reduce per
parameter after backward (by formula), in every step. What the answer computes itself from backward on takes no time
in that replay, so that nothing hides behind work for show. Replayed: hooks with flat buckets 4 %, torch's
in that replay, so that nothing hides behind work for show. Replayed: hooks with flat buckets 4 %, torch's
DistributedDataParallel 2 %, one bucket for everything 39 %, blocking buckets 66 %. Left out: GPUs' own streams, and
static graphs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab02.average_told as told
import labkit.labs.lab02.bucketed_cases as cases
import labkit.labs.lab02.bucketed_evidence as how
import labkit.labs.lab02.bucketed_steps as steps
from labkit.check import evidence
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.inputs import head, same
from labkit.labs.lab02.bucketed_cases import Case, Serial

NAME = "BucketedDDP"
_SPECIAL = {
    "order": (
        "registration_order",
        "it works while layers are used in the order in which they are registered. Here they are not, so gradients "
        "come in another order: a bucket is ready when every gradient of it has come, whichever is last.",
    ),
    "frozen": (
        "frozen_parameter",
        "it works while every parameter is trained. A parameter with requires_grad False gets no gradient and takes no "
        "hook; it and the buffers are broadcast all the same.",
    ),
    "tied": (
        "tied_weights",
        "it works while every layer has a weight of its own. Here two layers share one, which gets one gradient.",
    ),
    "unused": (
        "unused_parameter",
        "it works while every parameter takes part. Here some have no gradient on some ranks, so their buckets do not "
        "fill in backward: finish() must send what is left, zeros for what is missing, and all ranks in one order.",
    ),
    "mixed": (
        "mixed_dtypes",
        "it works while all parameters are of one dtype. Here are bfloat16 and float32: a bucket is one flat tensor, "
        "so it holds one dtype.",
    ),
}
# Causes that say less than what is special about a case; and those that it explains.
_VAGUE = ("some_left", "still_own", "remainder", "unused_parameter")
_EXPLAINED = (("dtype_lost", "mixed"), ("sent_too_soon", "order"))


def judge(cls: Callable, seed: int) -> Verdict:
    """A plain model first, then what is special one by one, the large model last; then how it came about."""
    seen: list[tuple[Case, Observed]] = []
    for case in cases.cases(random.Random(seed)):
        observed = observe(cls, case)
        found = _tried(case, observed)
        if found is not None:
            sizes = {each.world_size for each, _ in seen}
            again = case.what in _SPECIAL and case.world_size not in sizes and found.stage in ("attempted", "values")
            return (_in_plain(cls, case, seed) if again else None) or found
        seen.append((case, observed))
    found, figures = how.large(*seen[-1])
    for question in (how.small, _honest):
        for case, observed in seen:
            found = found or question(case, observed)
    return found or right(figures)


def _tried(case: Case, observed: Observed) -> Verdict | None:
    found = _ran(case, observed) or how.by_hand(case, observed)
    return found or _values(case, observed, cases.serial(case))


def _in_plain(cls: Callable, special: Case, seed: int) -> Verdict | None:
    """What is wrong on so many ranks already with a plain model: then it is not what is special about the case."""
    case = cases.plain(random.Random(seed), special.world_size)
    return _tried(case, observe(cls, case))


def _honest(case: Case, observed: Observed) -> Verdict | None:
    return honest(observed, case.tried)


def observe(cls: Callable, case: Case) -> Observed:
    """Train by `cls` on ranks, under watch."""
    return evidence.observe(steps.train, case.world_size, args=(cls,), rank_args=case.rank_args, deadline_s=40.0)


def _ran(case: Case, observed: Observed) -> Verdict | None:
    failed = attempts.ran(observed, NAME, case.tried)
    if failed is None or failed.stage != "attempted" or any(type(r) is attempts.Unusable for r in observed.results):
        return failed
    if failed.cause == "not_attempted" or case.what not in _SPECIAL:
        return failed
    cause, sentence = _SPECIAL[case.what]
    return wrong("attempted", cause, f"{sentence} {failed.sentence}", case.tried, failed.got, failed.expected)


def _values(case: Case, observed: Observed, serial: Serial) -> Verdict | None:
    found = _start(case, observed, serial) if case.plan.returns_state else None
    if found is not None:
        return found
    for step in range(case.steps):
        found = found or _gradients(case, observed, serial, step)
    found = found or _trained(case, observed, serial)
    # A race gives any numbers: the record knows of it first.
    return found and (how.waited(case, observed) or found)


def _trained(case: Case, observed: Observed, serial: Serial) -> Verdict | None:
    """Losses of every step, and parameters and buffers at the end."""
    for rank, result in enumerate(observed.results):
        for step in range(case.steps):
            got, due = result["losses"][step], serial.losses[step][rank]
            if not abs(got - due) <= 1e-4 * abs(due):
                sentence = f"rank {rank}'s loss of step {step} is not that of serial training on the same batch."
                cause = "wrong_output" if step == 0 else "wrong_losses"
                return wrong("serial", cause, sentence, case.tried, f"{got:.6g}", f"{due:.6g}")
        for name, due in serial.end.items() if case.plan.returns_state else ():
            if not told.close(result["end"][name], due):
                sentence = f"rank {rank}'s {name} after {case.steps} steps is not that of serial training."
                return wrong("serial", "wrong_parameters", sentence, case.tried, head(result["end"][name]), head(due))
    return None


def _start(case: Case, observed: Observed, serial: Serial) -> Verdict | None:
    starts = [result["start"] for result in observed.results]
    drawn = [cases.drawn(case, rank) for rank in range(case.world_size)]
    for rank, start in enumerate(starts):
        for name, due in serial.start.items():
            if not same(start[name], due):
                cause, sentence = _wrong_start(case, starts, drawn, rank, name)
                got = f"rank {rank}, {name}: {head(start[name])}"
                return wrong("values", cause, sentence, case.tried, got, head(due))
    return None


def _wrong_start(case: Case, starts: list, drawn: list, rank: int, name: str) -> tuple[str, str]:
    module, dtype = cases.module_of(case), drawn[0][name].dtype
    if starts[rank][name].dtype != dtype:
        sentence = f"rank {rank}'s {name} is {starts[rank][name].dtype} afterwards and was {dtype}: keep its dtype."
        return "wrong_start", sentence
    kept = [each for each in starts[rank] if not same(starts[rank][each], drawn[0][each])]
    if all(same(starts[rank][each], drawn[rank][each]) for each in kept):
        if set(kept) <= {each for each, _ in module.named_buffers()} - set(module.state_dict()):
            sentence = f"rank {rank} keeps its own {name}, a buffer with persistent=False: state_dict() leaves it out."
            return "buffers_not_broadcast", sentence
        if set(kept) <= {each for each, _ in module.named_buffers()}:
            return "buffers_not_broadcast", f"rank {rank} keeps its own buffers: they are broadcast as parameters are."
        frozen = {each for each, p in module.named_parameters() if not p.requires_grad}
        if set(kept) <= frozen | {each for each, _ in module.named_buffers()}:
            return "frozen_not_broadcast", f"rank {rank} keeps its own {name}: what is frozen is broadcast as well."
        return "not_broadcast", f"rank {rank} begins with its own {name}: every rank must begin with rank 0's."
    everyone = [state[name].double() for state in drawn]
    if told.close(starts[rank][name].double(), sum(everyone) / len(everyone)):
        return "start_averaged", f"{name} begins as the mean over ranks: every rank must begin with rank 0's."
    for other, state in enumerate(drawn[1:], 1):
        if same(starts[rank][name], state[name]):
            return "wrong_root", f"{name} begins as rank {other}'s: every rank must begin with rank 0's."
    return "wrong_start", f"rank {rank} does not begin with rank 0's {name}."


def _gradients(case: Case, observed: Observed, serial: Serial, step: int) -> Verdict | None:
    got = [result["grads"][step] for result in observed.results]
    for rank, grads in enumerate(got):
        for name, grad in grads.items():
            if name not in serial.sizes and grad is not None:
                sentence = f"rank {rank}'s {name} is frozen (requires_grad is False): leave its `.grad` alone."
                return wrong("values", "frozen_parameter", sentence, case.tried, head(grad), "None")
    averaged = told.Averaged(serial.own[step], got, serial.means[step])
    for rank, name in averaged.wrong:
        cause, sentence = _wrong_gradient(case, serial, averaged, step)
        held = "None" if got[rank][name] is None else head(got[rank][name])
        due = "None" if averaged.mean[name] is None else head(averaged.mean[name])
        where = f"step {step}, rank {rank}, {name}: {held}"
        return wrong("values", cause, sentence, case.tried, where, due)
    return None


def _wrong_gradient(case: Case, serial: Serial, averaged: told.Averaged, step: int) -> tuple[str, str]:
    if step:
        sentence = "the first step is right and a later one is not: what finish() has used up must be made ready again."
        return "later_steps", sentence
    if all(grads[name] is None for grads in averaged.got for name in averaged.mean):
        return "no_gradients", "the module's parameters have no gradient: train the module that was given, not a copy."
    known = _told(averaged) or told.wrong_gradients(averaged)
    if case.what in _SPECIAL and (known is None or known[0] in _VAGUE or (known[0], case.what) in _EXPLAINED):
        cause, sentence = _SPECIAL[case.what]
        return cause, f"{sentence}{f' Here {known[1]}' if known else ''}"
    if known is not None and known[0] == "some_left":
        names = list(averaged.mean)
        left = {name for _, name in averaged.wrong}
        if left == set(names[: len(left)]):
            sentence = f"the last bucket is never reduced: it holds {', '.join(sorted(left)[:3])}, and may not be full."
            return "last_bucket", sentence
    return known or _slices(averaged) or (
        "wrong_values",
        "gradients are no mean over ranks: does every part of a bucket go back to the parameter that it came from?",
    )


def _told(averaged: told.Averaged) -> tuple[str, str] | None:
    """Mistakes that buckets and hooks lead to."""
    own, mean = averaged.own, averaged.mean
    for rank, name in averaged.wrong:
        if averaged.got[rank][name] is None and own[rank][name] is None:
            sentence = f"rank {rank}'s {name} has no gradient afterwards. It took no part there but on another rank: "
            return "unused_parameter", f"{sentence}zeros count, and the mean is due on every rank."
    got = averaged.got
    zeros = [name for rank, name in averaged.wrong if own[rank][name] is not None and _is_zero(got[rank][name])]
    if zeros and all(_is_zero(grads[name]) for grads in got for name in zeros):
        sentence = f"zeros were averaged for {', '.join(dict.fromkeys(zeros[:3]))}: a bucket was sent before every "
        return "sent_too_soon", f"{sentence}gradient of it was in `.grad`. Count each once, when it is there."
    both = {name: [None if m is None or g[name] is None else m + g[name] for g in own] for name, m in mean.items()}
    if averaged.all(lambda rank, name: both[name][rank]):
        return "added_to_own", "`.grad` is the mean plus the rank's own gradient: the mean takes its place."
    return None


def _is_zero(grad: Any) -> bool:
    return grad is not None and not grad.any()


def _slices(averaged: told.Averaged) -> tuple[str, str] | None:
    """Whether the right numbers stand in the wrong places."""
    import torch

    def numbers(grads: dict[str, Any]) -> Any:
        return torch.cat([grad.double().flatten() for grad in grads.values() if grad is not None]).sort().values

    got, due = numbers({name: averaged.got[0][name] for name in averaged.mean}), numbers(averaged.mean)
    if got.shape != due.shape or not told.close(got, due):
        return None
    sentence = "these are the right numbers in the wrong places: a bucket is taken apart as it was put together."
    return "wrong_slices", sentence
