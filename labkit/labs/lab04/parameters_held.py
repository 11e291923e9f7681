"""Whole parameters and what was sent for them, in exercise 4.3, from the record.

Left out: whether values are right (`told`), and numbers put elsewhere while all is gathered, which saves nothing.
"""

from __future__ import annotations

from typing import Any

import labkit.labs.lab04.evidence as how
import labkit.labs.lab04.models as models
import labkit.labs.lab04.training as training
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong
from labkit.labs.lab04.evidence import Sizes
from labkit.labs.lab04.models import Case

# Of the largest parameter: what may be there at once beside a rank's parts and what autograd keeps. gloo's two threads
# hold what they have just sent a moment longer, which is up to 2 of it.
IN_FORWARD, IN_BACKWARD = 6, 7
# What is said of bytes between steps where nothing but their number is known.
_VAGUE = ("state_not_sharded", "copy_kept", "one_moment_whole", "full_state", "unbalanced", "master_kept")


def all_sizes(case: Case) -> Sizes:
    """Of all parameters, frozen ones too."""
    parameters = models.build(case.plan, 0).parameters()
    return Sizes(tuple(p.numel() for p in parameters), case.world_size)


def activation_bytes(case: Case) -> int:
    """What autograd holds at the end of forward of the plain module, at most over the batches of rank 0."""
    from labkit.record.trace import Trace

    module, most = models.build(case.plan, case.seed), 0
    for step in case.batches[0]:
        for inputs, targets in step:
            with Trace() as trace:
                loss = models.loss_of(module(*inputs), targets)
            del loss
            most = max(most, trace.record.end_bytes - trace.record.begin_bytes)
    return most


def used_in_backward(case: Case) -> int:
    """Elements of the parameters that autograd saves in a forward of the plain module: backward needs them whole."""
    from torch.autograd.graph import saved_tensors_hooks

    module, saved = models.build(case.plan, case.seed), set()

    def noted(tensor: Any) -> Any:
        saved.add(tensor.untyped_storage()._cdata)
        return tensor

    inputs, targets = case.batches[0][0][0]
    with saved_tensors_hooks(noted, lambda tensor: tensor):
        loss = models.loss_of(module(*inputs), targets)
    del loss
    return sum(p.numel() for p in module.parameters() if p.untyped_storage()._cdata in saved)


def between(case: Case, observed: Observed) -> Verdict | None:
    """Between steps a rank holds its part of parameters and of the state.

    Causes "parameters_kept", "frozen_kept", and those of the state.
    """
    every, width = all_sizes(case), how.width_of(case)
    whole, part = width * every.total, width * every.shard
    due = how.state_bytes_per_element(case) * how.sizes_of(case).total // case.world_size
    rest = [[now + whole for now in by_step] for by_step in how.held_between(case, observed)]
    for rank, by_step in enumerate(rest):
        for step, now in enumerate(by_step):
            if whole <= now - due <= whole + part + width * max(every.elements):
                sentence = f"rank {rank} holds all parameters whole between steps: a rank keeps its part of each."
                got, wanted = f"after step {step}: {now} bytes", f"parameters and state: {part + due} bytes"
                return wrong("evidence", "parameters_kept", sentence, case.tried, got, wanted)
    state = how.sizes_of(case)
    spare = 4 * state.shard + 2 * width * max(every.elements)
    least = part if width == 4 else 0  # an fp32 copy may stand for a bf16 part
    kept = [[now - least for now in each] for each in rest]
    found = how.state_is_sharded(case, observed, spare + part - least, kept)
    frozen = width * (every.total - state.total) * (case.world_size - 1) // case.world_size
    over = max(map(max, rest)) - due - part
    if found is None or found.cause not in _VAGUE or not frozen or over < 0.9 * frozen:
        return found
    sentence = "a rank has frozen parameters whole between steps: cut them too, and free them after backward."
    return wrong("evidence", "frozen_kept", sentence, case.tried, f"{over} bytes too many", f"0 ({frozen} if all are)")


def forward(case: Case, observed: Observed) -> Verdict | None:
    """Causes "kept_after_forward" (whole when forward is over), "gathered_at_once" (many whole at a time)."""
    kept, largest = activation_bytes(case), how.width_of(case) * max(all_sizes(case).elements)
    for rank, record in enumerate(observed.records):
        for begin, end, before in _forwards(record, case):
            held = training.held_at(record, end) - before
            if held > kept + 2 * largest:
                sentence = f"rank {rank} still holds gathered parameters when forward is over: free each after its use."
                got, due = f"{held} bytes more than before forward", f"{kept} that autograd keeps"
                return wrong("evidence", "kept_after_forward", sentence, case.tried, got, due)
            peak = training.peak_in(record, begin, end) - before
            if peak > kept + IN_FORWARD * largest:
                sentence = f"rank {rank} has many parameters whole at once in forward: gather one module's, use, free."
                got, due = f"{peak} bytes more than before forward", f"at most {kept + IN_FORWARD * largest}"
                return wrong("evidence", "gathered_at_once", sentence, case.tried, got, due)
    return None


def _forwards(record: Any, case: Case) -> list[tuple[int, int, int]]:
    """(begin, end, bytes held before) of every forward. Parts of gradients that came before count as before."""
    _, steps = training.cuts(record, case.micro)
    found = []
    for cut in steps:
        begin = cut.begin
        for start, end in cut.backwards:
            found.append((begin, start, training.held_at(record, begin)))
            begin = end
    return found


def backward(case: Case, observed: Observed) -> Verdict | None:
    """Causes "after_backward", "gradients_kept", "kept_after_backward" and "whole_in_backward"."""
    sizes = how.sizes_of(case)
    part, largest = 4 * sizes.shard, how.width_of(case) * max(all_sizes(case).elements)
    share = sizes.total * (case.world_size - 1) / case.world_size
    for rank, (result, record) in enumerate(zip(observed.results, observed.records, strict=True)):
        _, steps = training.cuts(record, case.micro)
        for cut, after in zip(steps, result["after"], strict=True):
            before = training.held_at(record, cut.begin)
            for (begin, end), grads in zip(cut.backwards, after, strict=True):
                reduced = [e for e in how.carriers(record, begin, end) if e.op != "all_gather"]
                sent = how.elements_sent(reduced)
                if sent < 0.9 * share:
                    sentence = "gradients are reduced when backward is over: let a hook reduce each as it appears."
                    got = f"rank {rank}: {sent:.0f} elements reduced in backward"
                    return wrong("evidence", "after_backward", sentence, case.tried, got, f"Ψ (N-1)/N = {share:.0f}")
                held = training.held_at(record, end) - before
                if held > part + 2 * largest:
                    return _kept(case, rank, held, grads, part)
                peak = training.peak_in(record, begin, end) - training.held_at(record, begin)
                if peak > part + IN_BACKWARD * largest:
                    sentence = f"rank {rank} has many parameters or gradients whole at once in backward: free each."
                    got, due = f"{peak} bytes more", f"at most {part + IN_BACKWARD * largest}"
                    return wrong("evidence", "whole_in_backward", sentence, case.tried, got, due)
    return None


def again(case: Case, observed: Observed) -> Verdict | None:
    """Cause "hidden_until_backward": whole parameters that backward used were neither held after forward nor sent.

    What tensors held then may all have been parameters, and two of the largest may have been whole between steps.
    """
    sizes, width = how.sizes_of(case), how.width_of(case)
    share = (case.world_size - 1) / case.world_size
    needed, spare = used_in_backward(case), 2 * max(all_sizes(case).elements)
    for rank, record in enumerate(observed.records):
        _, steps = training.cuts(record, case.micro)
        forwards = iter(_forwards(record, case))
        for begin, end in [backward for cut in steps for backward in cut.backwards]:
            _, over, before = next(forwards)
            there = spare + max(0, training.held_at(record, over) - before) // width
            count = how.elements_sent(how.carriers(record, begin, end)) / share
            if count < sizes.total + needed - there - how.SCALARS:
                sentence = f"rank {rank} used whole parameters in backward that no tensor held when forward was over, "
                sentence += "and did not gather them again: numbers were kept elsewhere."
                got = f"{count * share:.0f} elements sent in backward"
                least = f"{needed} elements of parameters are used, at most {there} were there; gradients {sizes.total}"
                return wrong("evidence", "hidden_until_backward", sentence, case.tried, got, least)
    return None


def _kept(case: Case, rank: int, held: int, grads: int, part: int) -> Verdict:
    cause, sentence = "kept_after_backward", f"rank {rank} holds whole parameters when backward is over: free them."
    if grads > part:
        cause, sentence = "gradients_kept", f"rank {rank} holds whole gradients when backward is over: free `.grad`."
    got = f"{held} bytes more than before forward"
    return wrong("evidence", cause, sentence, case.tried, got, f"4Ψ/N = {part} bytes of gradients")


def traffic(case: Case, observed: Observed) -> Verdict | None:
    """(N-1)/N of 3Ψ for every backward of a step, padding counted; less where backward needs no parameters.

    Causes as of `evidence.traffic`, and "gathered_too_often".
    """
    every, sizes = all_sizes(case), how.sizes_of(case)
    share = (case.world_size - 1) / case.world_size
    for rank, record in enumerate(observed.records):
        _, steps = training.cuts(record, case.micro)
        for number, (cut, micro) in enumerate(zip(steps, case.micro, strict=True)):
            sent = how.carriers(record, cut.begin, cut.cleared)
            count = how.elements_sent(sent)
            got = f"rank {rank}, step {number}: {count:.0f} elements sent"
            wanted = f"{3 * micro}Ψ (N-1)/N = {3 * micro * sizes.total * share:.0f}, padding aside"
            if count > micro * (2 * every.padded + sizes.padded) * share + how.SCALARS:
                cause, sentence = how.why_more(sent, sizes, share, 2 * micro)
                return wrong("evidence", cause, sentence, case.tried, got, wanted)
            unused = 0.7 if case.plan.branches else 1.0
            if count < 2 * micro * sizes.total * share * unused - how.SCALARS:
                sentence = "the values are right, but too little went through collectives for them."
                return wrong("evidence", "less_traffic", sentence, case.tried, got, wanted)
    return None


def figures(case: Case, observed: Observed) -> str:
    """What was measured, for a pass."""
    sizes, record, width = all_sizes(case), observed.records[0], how.width_of(case)
    _, steps = training.cuts(record, case.micro)
    cut = steps[-1]
    rest = how.held_between(case, observed)[0][-1] + width * sizes.total
    whole = max(training.peak_in(record, begin, end) - before for begin, end, before in _forwards(record, case))
    sent = how.elements_sent(how.carriers(record, cut.begin, cut.cleared)) / case.micro[-1]
    each = width + how.state_bytes_per_element(case)
    return (
        f"of {sizes.total} parameters each of {sizes.world_size} ranks holds {rest} bytes of parameters and state "
        f"between steps ({each}Ψ/N is {each * sizes.total / sizes.world_size:.0f}), in forward at most {whole} more, "
        f"{activation_bytes(case)} of them activations (whole: {width * sizes.total}); a backward costs "
        f"{sent / sizes.total:.2f}Ψ elements"
    )
