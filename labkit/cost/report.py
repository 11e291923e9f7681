"""An estimate as text for a terminal of 80 columns: a table, a bar, fits or not, and what would make it fit.

Plain text, no colours. Sizes are in GiB (2^30 bytes), as devices' memory is; traffic in GB (1e9), as links are.
"""

from __future__ import annotations

import textwrap

from labkit.cost.changes import Change
from labkit.cost.estimate import Estimate, assumptions
from labkit.cost.shapes import active_parameters

GIB = 2**30
WIDTH = 78
BAR = 60


def text(result: Estimate, changes: tuple[Change, ...] = ()) -> str:
    """All of it, lines of at most 80 columns."""
    lines = [*_head(result), "", *_table(result), "", *_bar(result), "", *_verdict(result, changes)]
    lines += ["", *_traffic(result), "", "Assumed:"]
    for each in assumptions(result):
        lines += textwrap.wrap(each, WIDTH, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


def parts(result: Estimate) -> tuple[tuple[str, str, int], ...]:
    """(letter, name, bytes) of each bar."""
    held = result.memory
    return (
        ("P", "parameters", held.parameters),
        ("G", "gradients", held.gradients),
        ("O", "optimizer", held.optimizer),
        ("A", "activations", held.layers),
        ("L", "logits and loss", held.logits),
        ("B", "buffers", held.buffers),
        ("C", "context and gaps", result.overheads.total),
    )


def _head(result: Estimate) -> list[str]:
    layout, shape = result.layout, result.shape
    active = f", {active_parameters(shape):,} active" if shape.experts else ""
    one = f"{layout.gpus} x {result.device.name}: dp {layout.dp}, tp {layout.tp}, pp {layout.pp}, cp {layout.cp}"
    two = f"ZeRO {layout.zero}, {layout.precision}, micro-batch {layout.micro_batch} x {layout.seq} tokens"
    two += f", recompute {layout.recompute}, offload {layout.offload}"
    two += f", program {layout.program}" if layout.program != "common" else ""
    lines = [f"{shape.name}: {shape_count(result)} parameters{active}", one, two]
    return [wrapped for line in lines for wrapped in textwrap.wrap(line, WIDTH)]


def shape_count(result: Estimate) -> str:
    return f"{result.parameters:,}"


def _table(result: Estimate) -> list[str]:
    needed = result.needed_bytes
    lines = [f"{'on one device':24}{'GiB':>10}{'share':>8}"]
    for letter, name, size in parts(result):
        lines.append(f"{letter} {name:22}{size / GIB:10.2f}{size / needed:8.0%}")
    return [*lines, f"{'  needed':24}{needed / GIB:10.2f}", f"{'  ' + result.device.name:24}{room(result):10.2f}"]


def room(result: Estimate) -> float:
    return result.device.memory_bytes / GIB


def _bar(result: Estimate) -> list[str]:
    """The parts side by side, to one scale with the device's memory; every part above 0 has its letter."""
    scale = BAR / max(result.needed_bytes, result.device.memory_bytes)
    drawn, reached, at = "", 0.0, 0
    for letter, _, size in parts(result):
        reached += size * scale
        wide = max(round(reached) - at, 1 if size else 0)
        drawn, at = drawn + letter * wide, at + wide
    edge = round(result.device.memory_bytes * scale)
    return [f"|{drawn.ljust(edge)}|", f"|{'-' * (edge - 1)}^ {result.device.name} {room(result):.0f} GiB"]


def _verdict(result: Estimate, changes: tuple[Change, ...]) -> list[str]:
    free = result.free_bytes / GIB
    if result.fits:
        return [f"Fits: {free:.2f} GiB are free."]
    lines = [f"Does not fit: {-free:.2f} GiB too much."]
    if not changes:
        return [*lines, "None of the changes tried makes it fit: a smaller model, or a device with more memory."]
    order = "Cheapest changes that make it fit: no more devices first, then the least device time per token "
    lines += textwrap.wrap(order + "(nothing overlapped):", WIDTH)
    for number, change in enumerate(changes, 1):
        held = change.result.needed_bytes / GIB
        words = f"{number}. {change.options}: {held:.2f} GiB, {change.slowdown:+.1%} time"
        host = change.result.memory.host
        words += f", {host * change.result.layout.gpus / GIB:.0f} GiB of host memory in all" if host else ""
        lines += textwrap.wrap(words, WIDTH, subsequent_indent="   ", break_on_hyphens=False)
    return lines


def _traffic(result: Estimate) -> list[str]:
    lines = ["sent by one device in one step, GB"]
    for axis, ops in result.communication.items():
        lines += [f"  {axis:6}{op:17}{size / 1e9:12.3f}" for op, size in ops.items()]
    if len(lines) == 1:
        lines = ["nothing is sent: one device"]
    per_token = result.model_flops / result.layout.tokens / 1e9
    again = result.hardware_flops / result.model_flops - 1
    return [*lines, f"FLOPs: {per_token:.2f} GFLOP per token, {again:.1%} more by recomputation"]
