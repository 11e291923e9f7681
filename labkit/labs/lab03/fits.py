"""What makes a model fit on given devices, folded as an answer that can be opened: changes that the cost model finds.

Left out: the search, which is `labkit.cost.changes`.
"""

from __future__ import annotations

from labkit.cost.changes import Change, cheapest
from labkit.cost.estimate import estimate
from labkit.cost.layout import Layout
from labkit.cost.named import named

ASKED = (("llama-3.1-8b", 1), ("llama-3.1-70b", 8))


def found(model: str, gpus: int, device: str = "H100") -> tuple[Change, ...]:
    """Changes after which it fits, from plain data parallelism and sequences of 4096 tokens; none where it fits."""
    return cheapest(estimate(named(model), Layout(seq=4096, dp=gpus), device))


def answers(asked: tuple[tuple[str, int], ...] = ASKED, device: str = "H100") -> str:
    """Markdown, folded: per (model, number of devices) a line for each change."""
    lines = []
    for model, gpus in asked:
        lines.append(f"\n{model} on {gpus} {device}:\n")
        lines += [f"- {_told(change)}" for change in found(model, gpus, device)] or ["- fits as it is"]
    order = "no more devices first, then the least device time per token, as <code>labkit estimate</code> has it"
    return f"<details><summary>An answer: {order}</summary>\n" + "\n".join(lines) + "\n\n</details>"


def _told(change: Change) -> str:
    held = change.result
    host = held.memory.host * held.layout.gpus / 2**30
    words = f"`{change.options}`: {held.needed_bytes / 2**30:.1f} GiB a device, {change.slowdown:+.0%} device time"
    return words + (f", {host:.0f} GiB of host memory in all" if host else "")
