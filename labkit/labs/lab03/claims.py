"""What articles say about memory in training, each with a figure that the cost model computes, and a verdict.

The claims of this lab alone: sizes of models, gradient accumulation, recomputation, 16 bits, a first loss scale. Left
out: ZeRO's (`labkit.cost.claims`), and activation checkpointing in a DeepSpeed configuration, which is lab 08's.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cost import flops, hardware, memory, shapes
from labkit.cost.layout import Layout
from labkit.cost.named import named
from labkit.cost.states import per_parameter


@dataclass(frozen=True)
class Claim:
    """said: what an article says. figure: computed, in words. verdict: "holds", "holds in part", "does not hold"."""

    said: str
    figure: str
    verdict: str


def claims(skipped: int, power: int = 32) -> tuple[Claim, ...]:
    """Verdicts. skipped: steps that a scaler which starts at 2**power skips, as it was seen to."""
    return (
        too_large(),
        accumulation(),
        recomputation(),
        sixteen_bits(),
        Claim(
            f'"initial_scale_power": {power}',
            f"{skipped} steps are skipped before the first one is taken; DeepSpeed's own default is 16",
            "does not hold" if skipped else "holds",
        ),
    )


def too_large(model: str = "gpt3-175b", device: str = "H100") -> Claim:
    """A model like GPT-3 exceeds a single GPU by far."""
    count = shapes.parameters(named(model))
    size = count * per_parameter("zero", "bf16").total
    card = hardware.device(device)
    verdict = "holds" if size > card.memory_bytes else "does not hold"
    return Claim(
        "GPT-3 exceeds one GPU", f"{size / 1e12:.2f} TB of states: {size / card.memory_bytes:.0f} {device}", verdict
    )


def accumulation(model: str = "llama-3.2-1b", steps: int = 8) -> Claim:
    """Microbatches instead of one batch: less memory."""
    shape = named(model)
    whole, parts = (memory.memory(shape, Layout(seq=4096, micro_batch=size)) for size in (steps, 1))
    figure = (
        f"{shape.name}, {steps} sequences of 4096: activations with logits {whole.activations / 1e9:.0f} GB at once, "
        f"{parts.activations / 1e9:.1f} GB one by one; states stay {(parts.total - parts.activations) / 1e9:.0f} GB"
    )
    return Claim("gradient accumulation when the batch does not fit", figure, "holds")


def recomputation(model: str = "llama-3.2-1b") -> Claim:
    """Checkpointing every layer: less memory, more time."""
    shape = named(model)
    none, full = (memory.memory(shape, Layout(seq=4096, micro_batch=4, recompute=how)) for how in ("none", "full"))
    more = flops.recomputed(shape, 4 * 4096, 4096, "full", True) / flops.model_flops(shape, 4 * 4096, 4096, True)
    kept = (full.layers + full.recomputed) / none.layers
    return Claim(
        "recompute activations instead of storing them",
        f"{shape.name}, 4 sequences of 4096: "
        f"layers hold {kept:.0%} of the bytes at the peak, for {more:.0%} more FLOPs",
        "holds",
    )


def sixteen_bits() -> Claim:
    """Mixed precision halves memory."""
    wide, mixed = (per_parameter("zero", precision).total for precision in ("fp32", "bf16"))
    figure = f"states: {mixed} bytes a parameter, and {wide} in fp32; activations are those that shrink"
    return Claim("fp16 mixed precision reduces memory", figure, "holds in part" if mixed >= wide else "holds")


def table(found: tuple[Claim, ...]) -> str:
    """A Markdown table."""
    lines = ["| an article says | computed | |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {each.said} | {each.figure} | **{each.verdict}** |" for each in found)])
