"""Data behind lab 06's pictures and tables: calls of a layer, bytes and activations of its variants.

Numbers come from recorded steps (`training`, `torchs`). Left out: drawing, and shares by wire (`shares`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab06.training as training
from labkit.check.table import table
from labkit.labs.lab06.training import Call, Trained


@dataclass(frozen=True)
class Variant:
    """One way to train on t ranks, from rank 0's record of a step. Bytes sent in one layer; held after forward, in all.

    calls: (op, how many) in one layer, forward and backward together.
    """

    name: str
    calls: tuple[tuple[str, int], ...]
    sent_bytes: float
    held_bytes: int


def layer_calls(trained: Trained) -> list[Call]:
    """Calls of a recorded step that carry x of a layer: the size of (b, s, h), between embedding and head."""
    size = training.BATCH * training.LENGTH * training.SIZES["hidden"] * 4
    return [call for call in trained.calls if call.num_bytes == size and call.module.startswith("layers")]


def calls_table(trained: Trained) -> str:
    """Calls of a recorded step by phase, op and size: how many, and where they were made."""
    found: dict[tuple[str, str, int], list[str]] = {}
    for call in trained.calls:
        found.setdefault((call.phase, call.op, call.num_bytes), []).append(call.module or "head")
    rows = []
    for (phase, op, num_bytes), modules in found.items():
        named = ", ".join(dict.fromkeys(modules))
        rows.append((phase, op, str(len(modules)), f"{num_bytes:,}", named))
    return table(("", "call", "times", "bytes each", "made in"), rows)


def variant(name: str, trained: Trained) -> Variant:
    """A recorded step as a row: what one layer sends, and what the rank holds after forward."""
    calls, layers = layer_calls(trained), training.SIZES["layers"]
    ops = dict.fromkeys(call.op for call in calls)
    counts = tuple((op, sum(call.op == op for call in calls) // layers) for op in ops)
    return Variant(name, counts, sum(call.sent_bytes for call in calls) / layers, trained.held_bytes[0])


def variants(cls: Any = None, parts: training.Parts | None = None, tp: int = 4) -> list[Variant]:
    """Tensor parallel, and sequence parallel with the gathered input kept and gathered again, on `tp` ranks, three
    steps.

    cls: of 6.5; parts: of the other exercises; by default stand-ins. The head is cut by vocabulary in the first alone.
    Raises as `training.train`.
    """
    plain = training.train(parts, tp, 3)
    return [
        variant("tensor parallel", plain),
        *(variant(name, training.train_sequence(cls, tp, 3, keep)) for name, keep in
          (("sequence parallel, kept", True), ("sequence parallel, gathered again", False))),
    ]  # fmt: skip


def variants_table(found: list[Variant]) -> str:
    """Variants as a table: calls and bytes of a layer's step, bytes held after forward."""
    rows = []
    for each in found:
        calls = ", ".join(f"{count} {op}" for op, count in each.calls)
        rows.append((each.name, calls, f"{each.sent_bytes:,.0f}", f"{each.held_bytes:,}"))
    return table(("", "calls of a layer", "bytes sent by a layer", "bytes held after forward"), rows)


def differences_table(found: Mapping[str, dict[str, float]]) -> str:
    """Runs by name with their `training.differences` to the serial one."""
    names = ("losses", "weights", "input gradients")
    return table(("", *names), [(name, *(f"{each[kind]:.1e}" for kind in names)) for name, each in found.items()])
