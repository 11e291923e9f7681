"""What is commonly claimed of ZeRO's stages (4x, 8x, Nx, half as much again, 100B, 500B, recomputation), with figures.

Each verdict is computed: for a number of ranks, a precision and a device; the last alone, that no stage recomputes, is
a fact, told with figures of a whole device. The others are of model states only: a claim that holds for them holds less
for a whole run. Left out: claims about time, which are measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from labkit.cost import hardware, states
from labkit.cost.layout import Layout
from labkit.cost.memory import memory
from labkit.cost.moved import data_parallel
from labkit.cost.named import named
from labkit.cost.parts import GIB, Device
from labkit.cost.shapes import Shape, parameters

VERDICTS = ("holds", "holds in part", "does not hold")
ENOUGH = 10**6  # ranks, for limits
NEAR = 0.95  # of what is claimed counts as reached
CLAIMED_TIMES = {1: 4, 2: 8}
CLAIMED_PARAMETERS = {1: 100e9, 2: 500e9, 3: 1e12}


@dataclass(frozen=True)
class Claim:
    """What a lab says of a guide. said: by the guide. verdict: "right", "half right" or "wrong". figure: why, in words
    with its number."""

    said: str
    verdict: str
    figure: str


@dataclass(frozen=True)
class Verdict:
    """claim: in a few words. figure: what is computed, in `unit`; limit: the most it can be. holds: one of VERDICTS.

    why: one sentence with the figures.
    """

    claim: str
    figure: float
    limit: float
    unit: str
    holds: str
    why: str


def saving(stage: int, ranks: int, precision: str = "bf16", convention: str = "zero") -> float:
    """How many times smaller a rank's model states are than without ZeRO (arXiv:1910.02054, Figure 1)."""
    each = states.per_parameter(convention, precision, stage)
    whole = states.per_parameter(convention, precision, 0).total
    return whole / (kept_bytes(each, stage) + divided_bytes(each, stage) / ranks)


def largest_saving(stage: int, precision: str = "bf16", convention: str = "zero") -> float:
    """What `saving` tends to with ever more ranks; inf at stage 3."""
    each = states.per_parameter(convention, precision, stage)
    kept = kept_bytes(each, stage)
    return states.per_parameter(convention, precision, 0).total / kept if kept else math.inf


def kept_bytes(each: states.PerParameter, stage: int) -> int:
    """Bytes per parameter that every rank keeps at this stage, however many ranks there are."""
    return each.total - divided_bytes(each, stage)


def divided_bytes(each: states.PerParameter, stage: int) -> int:
    """Bytes per parameter that this stage divides among the ranks."""
    divided = each.optimizer + each.gradient_copy if stage >= 1 else 0
    divided += each.gradient if stage >= 2 else 0
    return divided + (each.parameter if stage >= 3 else 0)


def ranks_for(stage: int, times: float, precision: str = "bf16", convention: str = "zero") -> int:
    """The fewest ranks at which `saving` reaches `times`. ValueError where no number of ranks does."""
    most = largest_saving(stage, precision, convention)
    if times >= most:
        raise ValueError(f"stage {stage} in {precision} never saves {times:g} times; less than {most:g} would do")
    each = states.per_parameter(convention, precision, stage)
    whole = states.per_parameter(convention, precision, 0).total
    needed = divided_bytes(each, stage) / (whole / times - kept_bytes(each, stage))
    return max(1, math.ceil(needed * (1 - 1e-12)))  # 57 that floating point makes 57.00000000000001 is 57


def communication(stage: int, microbatches: int = 1, ranks: int = ENOUGH) -> float:
    """Elements sent per parameter and step (arXiv:1910.02054, section 7): 2, 2, 2 and 3 at one microbatch.

    With k microbatches stage 2 reduces every one's gradients (k + 1), stage 3 gathers and reduces for each (3 k);
    stages 0 and 1 add gradients up first. Rings: (N-1)/N of it.
    """
    block = Shape("any", 1, 1024, 8, 8, 128, 4096, 10**6)
    layout = Layout(dp=ranks, zero=stage, microbatches=microbatches)
    sent = sum(data_parallel(block, layout, 0).values())
    return sent / parameters(block) / states.element_bytes(layout.precision)


def largest(stage: int, ranks: int, memory_bytes: float, mp: int = 1, precision: str = "bf16") -> float:
    """Parameters of the largest model whose states fit, each of `mp` model-parallel parts divided over `ranks`."""
    return states.largest_parameters(memory_bytes, states.per_parameter("zero", precision), stage, ranks, mp)


def model_parallel_for(num_parameters: float, stage: int, ranks: int, memory_bytes: float) -> int:
    """The least degree of model parallelism at which the states of such a model fit, at this stage over `ranks`."""
    return math.ceil(num_parameters / largest(stage, ranks, memory_bytes))


def recomputation(shape: Shape, layout: Layout) -> tuple[tuple[int, int, int], ...]:
    """(ZeRO stage, bytes of the first device without recomputation, with it), stages 0 to 3: all that is held."""
    found = []
    for stage in range(4):
        plain = replace(layout, zero=stage, recompute="none", offload="none")
        again = replace(plain, recompute="full")
        found.append((stage, memory(shape, plain, 0).total, memory(shape, again, 0).total))
    return tuple(found)


def verdicts(
    ranks: int = 8, device: str | Device = "H100", precision: str = "bf16", microbatches: int = 1
) -> tuple[Verdict, ...]:
    """The claims in order: savings of stages 1 to 3, communication of 1 to 3, sizes of 1 to 3, recomputation.

    ValueError for a device, precision or number of ranks that cannot be.
    """
    card = hardware.device(device)
    if ranks < 2 or microbatches < 1:
        raise ValueError(f"ranks must be 2 or more and microbatches 1 or more, not {ranks} and {microbatches}")
    return (
        *(_saving(stage, ranks, precision) for stage in (1, 2, 3)),
        *(_communication(stage, ranks, microbatches) for stage in (1, 2, 3)),
        *(_size(stage, ranks, card, precision) for stage in (1, 2, 3)),
        _recomputation(ranks),
    )


def _saving(stage: int, ranks: int, precision: str) -> Verdict:
    claimed = CLAIMED_TIMES.get(stage, ranks)
    figure, most = saving(stage, ranks, precision), largest_saving(stage, precision)
    holds = VERDICTS[0] if figure >= NEAR * claimed else VERDICTS[1] if most >= claimed else VERDICTS[2]
    why = f"{figure:.2f} times among {ranks} ranks in {precision}"
    if stage == 3:
        why += ", of the states alone: activations and the layer that is gathered are not divided"
    else:
        why += f"; {most:.3g} is the limit for ever more ranks"
        if most >= claimed:
            why += f", {NEAR:.0%} of {claimed} takes {ranks_for(stage, NEAR * claimed, precision)} ranks"
    name = f"ZeRO-{stage} saves up to {'N' if stage == 3 else claimed} times"
    return Verdict(name, figure, most, "times less memory", holds, why)


def _communication(stage: int, ranks: int, microbatches: int) -> Verdict:
    against = 2 if stage == 3 else stage - 1
    sent, other = (communication(each, microbatches, ranks) for each in (stage, against))
    figure, claimed = sent / other, 1.5 if stage == 3 else 1.0
    one = communication(stage, 1, ranks) / communication(against, 1, ranks)
    most = {1: 1.0, 2: math.inf, 3: 3.0}[stage]
    same = math.isclose(figure, claimed, rel_tol=1e-6)
    holds = VERDICTS[0] if same else VERDICTS[1] if math.isclose(one, claimed, rel_tol=1e-6) else VERDICTS[2]
    why = f"{sent:.3g} elements per parameter against {other:.3g} with {microbatches} microbatch"
    if microbatches > 1:
        again = {1: "gradients are added up first", 2: "stage 2 reduces each one's gradients"}
        why += "es: " + again.get(stage, "stage 3 also gathers the parameters twice for each one")
    name = "sends half as much again as ZeRO-2" if stage == 3 else f"sends as much as {'ZeRO-1' if against else 'DDP'}"
    return Verdict(f"ZeRO-{stage} {name}", figure, most, f"times what stage {against} sends", holds, why)


def _size(stage: int, ranks: int, card: Device, precision: str) -> Verdict:
    """Without model parallelism; how much of it a size needs is in the sentence (as arXiv:1910.02054, Table 2)."""
    claimed = CLAIMED_PARAMETERS[stage]
    figure = largest(stage, ranks, card.memory_bytes, precision=precision)
    kept = kept_bytes(states.per_parameter("zero", precision), stage)
    most = card.memory_bytes / kept if kept else math.inf
    holds = VERDICTS[0] if figure >= claimed else VERDICTS[1] if most >= claimed else VERDICTS[2]
    why = f"states of at most {figure / 1e9:.1f}B fit on {ranks} {card.name}"
    if kept:
        mp = model_parallel_for(claimed, stage, ranks, card.memory_bytes)
        why += f", of {most / 1e9:.1f}B on any number: {claimed / 1e9:.0f}B needs {mp} model-parallel parts as well"
    else:
        each = states.per_parameter("zero", precision).total
        why += f"; {claimed / 1e9:.0f}B needs {math.ceil(claimed * each / card.memory_bytes)} of them"
    return Verdict(f"ZeRO-{stage} is for {claimed / 1e9:.0f}B", figure, most, "parameters", holds, why)


def _recomputation(ranks: int) -> Verdict:
    """No comparison but a fact: ZeRO divides states alone (arXiv:1910.02054, section 5), so that no stage recomputes.
    What is computed is what that switch does beside stage 2, on one model of 8B: it depends on the model."""
    shape = named("llama-3.1-8b")
    (_, plain, again), (_, *most) = (recomputation(shape, Layout(dp=count))[2] for count in (ranks, ENOUGH))
    why = (
        f"ZeRO divides states and leaves activations as they are; recomputation is a switch of its own, by which a "
        f"device at stage 2 holds {again / GIB:.1f} GiB instead of {plain / GIB:.1f} ({shape.name}, 4096 tokens)"
    )
    return Verdict(
        "recomputation is part of ZeRO-2",
        plain / again,
        most[0] / most[1],
        "times less memory with it",
        VERDICTS[2],
        why,
    )
