"""Data behind lab 06's pictures and tables: calls of a layer, bytes and activations of its variants.

Numbers come from recorded steps (`training`, `torchs`), and beside them stands what the formula says. Left out:
drawing, shares by wire (`shares`), and what is kept outside of layers: the embedding's output, last norm, logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab06.in_rank as in_rank
import labkit.labs.lab06.training as training
from labkit.check.table import table
from labkit.cost.layout import Layout
from labkit.cost.shapes import Shape
from labkit.cost.tensor_parallel import kept_bytes
from labkit.labs.lab06.training import Call, Trained
from labkit.record.events import RankRecord

FORMULA = """By formula, bytes per token of the whole batch in fp32: both norms 8(3h + 1), over t in sequence parallel
alone; q, k, v, their output and log-sum-exp, and four tensors of the MLP 4(4h + a + 4f), always over t; the two
gathered inputs, where kept, 8h(t - 1)/t more. h: hidden size, f: the MLP's width, a: heads, to all of which keys and
values are repeated. Recorded is more where an answer keeps more, scores or weights put together."""


@dataclass(frozen=True)
class Variant:
    """One way to train on t ranks, from rank 0's record of a step: what one of its layers does.

    calls: (op, how many), forward and backward together. sent_bytes: in them. kept_bytes: made in the layer, and still
    there at the end of forward. formula_bytes: the same, as `labkit.cost` has it.
    """

    name: str
    calls: tuple[tuple[str, int], ...]
    sent_bytes: float
    kept_bytes: float
    formula_bytes: float


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


def variant(name: str, trained: Trained, formula_bytes: float) -> Variant:
    """A recorded step as a row."""
    calls, layers = layer_calls(trained), training.SIZES["layers"]
    ops = dict.fromkeys(call.op for call in calls)
    counts = tuple((op, sum(call.op == op for call in calls) // layers) for op in ops)
    sent_bytes = sum(call.sent_bytes for call in calls) / layers
    return Variant(name, counts, sent_bytes, kept_in_layers(trained.records[0]) / layers, formula_bytes)


def kept_in_layers(record: RankRecord) -> int:
    """Bytes of what was made in a layer's forward and still lives when the whole forward is done, by module's name."""
    begin, middle = in_rank.marks(record)[:2]
    owners = dict(record.modules)
    deltas = [delta for delta in record.deltas if begin < delta.index <= middle]
    return sum(delta.num_bytes for delta in deltas if owners.get(delta.storage, "").startswith("layers"))


def formula(tp: int, sequence: bool, gathered: bool = False) -> float:
    """Bytes that one layer of lab 06's Llama keeps on each of `tp` ranks."""
    sizes = training.SIZES
    shape = Shape("lab 06's Llama", head_dim=sizes["hidden"] // sizes["heads"], **sizes)
    layout = Layout(
        tp=tp, seq=training.LENGTH, micro_batch=training.BATCH, precision="fp32", sequence_parallel=sequence
    )
    return kept_bytes(shape, layout, gathered)


def variants(cls: Any = None, parts: training.Parts | None = None, tp: int = 4) -> list[Variant]:
    """Tensor parallel, and sequence parallel with the gathered input kept and gathered again, on `tp` ranks, three
    steps.

    cls: of 6.5; parts: of the other exercises; by default stand-ins. The head is cut by vocabulary in the first alone.
    Raises as `training.train`.
    """
    found = [variant("tensor parallel", training.train(parts, tp, 3), formula(tp, sequence=False))]
    for name, keep in (("sequence parallel, kept", True), ("sequence parallel, gathered again", False)):
        trained = training.train_sequence(cls, tp, 3, keep)
        found.append(variant(name, trained, formula(tp, sequence=True, gathered=keep)))
    return found


def variants_table(found: list[Variant]) -> str:
    """Variants as a table: calls of a layer's step, bytes sent in them, bytes kept from forward to backward."""
    rows = []
    for each in found:
        calls = ", ".join(f"{count} {op}" for op, count in each.calls)
        rows.append((each.name, calls, *(f"{n:,.0f}" for n in (each.sent_bytes, each.kept_bytes, each.formula_bytes))))
    return table(("one layer", "calls", "bytes sent", "bytes kept", "by formula"), rows)


def differences_table(found: Mapping[str, dict[str, float]]) -> str:
    """Runs by name with their `training.differences` to the serial one."""
    names = ("losses", "weights", "input gradients")
    return table(("", *names), [(name, *(f"{each[kind]:.1e}" for kind in names)) for name, each in found.items()])
