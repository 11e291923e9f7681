"""One decoder layer cut over t ranks as Megatron-LM cuts it: what a rank computes, what it waits for, what it keeps.

Shoeybi et al., arXiv:1909.08053, section 3: the query, key, value and first MLP matrices lose columns, the output and
last MLP matrices rows; per layer two all_reduces of b s h in forward and two in backward, and nothing hides them, for
the next product needs their result. Products take what the roofline says (`Device.time_s`), forward and twice that in
backward. Left out: norms, activations and residuals (which each rank does whole), the start of kernels, so the share
that is computed here is too high for layers of a few microseconds; embedding and head.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cost import activations, comm, eager, flops
from labkit.cost.groups import Group
from labkit.cost.layout import Layout
from labkit.cost.parts import Device
from labkit.cost.shapes import Shape, rank_kv_heads
from labkit.cost.states import element_bytes

ALL_REDUCES = 4  # of a layer: two in forward, two in backward


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer, forward and backward: of products, and of all_reduces, which come on top."""

    compute_s: float
    communication_s: float

    @property
    def time_s(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def share(self) -> float:
        """Share of the time in which the rank waits for the network."""
        return self.communication_s / self.time_s


def layer_time(shape: Shape, tokens: int, seq: int, device: Device, group: Group, dtype: str = "bf16") -> LayerTime:
    """One layer on each rank of `group`, for `tokens` tokens in sequences of seq, all ranks the same ones.

    ValueError where the heads or the MLP cannot be divided among the ranks, or the device has no such arithmetic.
    """
    size = element_bytes("fp32" if dtype == "tf32" else dtype)
    cut = products(shape, tokens, group.size)
    compute_s = sum(3 * device.time_s(*of_product(*product, size), dtype) for product in cut)
    core = 3 * flops.core_forward(shape, tokens, seq, causal=True) / group.size
    compute_s += core / device.peak(dtype)
    reduced_s = comm.group_time_s("all_reduce", tokens * shape.hidden * size, group)
    return LayerTime(compute_s, ALL_REDUCES * reduced_s if group.size > 1 else 0.0)


def kept_bytes(shape: Shape, layout: Layout, gathered: bool = False) -> float:
    """What a layer keeps on each of layout.tp ranks from forward to backward, in convention `eager`,
    nothing being recomputed.

    Between the regions of tensor parallelism all of it is on every rank, with sequence parallelism 1/t (Korthikanti et
    al., arXiv:2205.05198, section 4.2.2, where the two inputs of parallel regions are gathered again in backward).
    gathered: these two are kept as they were gathered, and the rank's own part of them is not.
    """
    kept = sum(each.num_bytes for each in eager.layer_saved(shape, layout))
    if gathered and layout.sequence_parallel:
        own = activations.sizes(shape, layout).hidden * element_bytes(layout.precision)
        kept += 2 * (layout.tp - 1) * own
    return kept


def products(shape: Shape, tokens: int, tp: int) -> tuple[tuple[int, int, int], ...]:
    """(rows, inner, columns) of each matrix product of one layer's forward on one of tp ranks.

    Fewer kv heads than ranks are copied, one to a rank. ValueError for what cannot be divided.
    """
    if tp < 1 or shape.heads % tp or shape.ffn % tp or max(tp, shape.kv_heads) % min(tp, shape.kv_heads):
        told = f"{shape.heads} heads, {shape.kv_heads} kv heads, ffn {shape.ffn}"
        raise ValueError(f"{shape.name} cannot be cut over {tp} ranks: {told}")
    query, keys, wide = shape.query_width // tp, rank_kv_heads(shape, tp) * shape.head_dim, shape.ffn // tp
    attention = [(tokens, shape.hidden, query), *[(tokens, shape.hidden, keys)] * 2, (tokens, query, shape.hidden)]
    first = [(tokens, shape.hidden, wide)] * (2 if shape.gated else 1)
    return *attention, *first, (tokens, wide, shape.hidden)


def of_product(rows: int, inner: int, columns: int, size: int) -> tuple[int, int]:
    """(FLOPs, bytes read and written) of one product whose elements have `size` bytes."""
    return 2 * rows * inner * columns, size * (rows * inner + inner * columns + rows * columns)


def llama_like(hidden: int) -> Shape:
    """One layer in the proportions of Llama 3 8B and 70B (arXiv:2407.21783, Table 3): ffn 3.5 h, 8 kv heads.

    Heads are 128 wide, narrower where there would be fewer than 16, so that 16 ranks can share them.
    ValueError for a hidden that 32 does not divide.
    """
    if hidden < 32 or hidden % 32:
        raise ValueError(f"hidden must be a multiple of 32, not {hidden}")
    heads = max(16, hidden // 128)
    return Shape(f"hidden {hidden}", 1, hidden, heads, 8, hidden // heads, 7 * hidden // 2, 128256)
