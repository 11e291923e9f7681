"""How a model is trained: on how many devices along which axes, in what pieces, by which conventions counted.

Axes are dp, tp, pp and cp; their product is the number of devices. ZeRO divides over dp x cp, as Megatron's distributed
optimizer and Llama 3 do: ranks of one context-parallel group hold the same parameters. Experts lie on ranks of that
same group (DeepSpeed-MoE, arXiv:2201.05596; Megatron-Core), so that ep adds no devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.cost import states
from labkit.cost.shapes import Shape

RECOMPUTE = ("none", "selective", "full")
ACTIVATIONS = ("megatron", "eager")
SIZES = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "microbatches", "seq", "interleave", "bucket", "node_gpus")
OR_NONE = ("shard_within", "per_node")
ZEROPP = ("qwz", "hpz", "qgz")
PROGRAMS = ("common", "nanotron", "torchtitan", "torchtune", "fsdp_lora", "fsdp_qlora")


@dataclass(frozen=True)
class Layout:
    """One way to train. micro_batch: sequences that a rank takes at once. microbatches: of one step, per rank.

    zero: ZeRO stage. recompute: of activations, "selective" that of the attention core alone. sequence_parallel: with
    tp, norms and dropout on a part of the sequence (Megatron's). interleave: chunks of layers per pipeline rank
    (Megatron's v). flash: attention that keeps no scores. convention: bytes of states; activations: of activations.
    bucket: elements of DeepSpeed's reduce_bucket_size. program: whose code trains; "common" for the formulas' own.
    ep: ranks over which a layer's experts are divided. shard_within: ranks over which ZeRO divides, with copies beyond
    them (hybrid sharding: HSDP, MiCS); 0 for all. zeropp: "none", or of ZeRO++ qwz, hpz and qgz, joined by +; "all".
    per_node: ranks of dp x cp in a node, for hpz and qgz; 0 for what tp leaves of its node_gpus, which `estimate` takes
    from the device. ValueError for what no model could be trained with.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    micro_batch: int = 1
    microbatches: int = 1
    seq: int = 4096
    recompute: str = "none"
    precision: str = "bf16"
    offload: str = "none"
    sequence_parallel: bool = True
    interleave: int = 1
    flash: bool = True
    convention: str = "zero"
    activations: str = "megatron"
    bucket: int = 500_000_000
    program: str = "common"
    ep: int = 1
    shard_within: int = 0
    zeropp: str = "none"
    per_node: int = 0
    node_gpus: int = 8

    def __post_init__(self):
        for field in (*SIZES, *OR_NONE):
            size, least = getattr(self, field), 0 if field in OR_NONE else 1
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise ValueError(f"{spelled(field)} must be a whole number of {least} or more, not {size!r}")
        for field, known in (("recompute", RECOMPUTE), ("activations", ACTIVATIONS), ("program", PROGRAMS)):
            if getattr(self, field) not in known:
                raise ValueError(f"{field} must be one of {', '.join(known)}, not {getattr(self, field)!r}")
        states.per_parameter(self.convention, self.precision, self.zero)
        states.check_offload(self.zero, self.offload)
        if self.interleave > 1 and (self.pp == 1 or self.microbatches % self.pp):
            raise ValueError(
                f"interleaving needs pp of 2 or more and microbatches in multiples of it, not pp {self.pp} and "
                f"{self.microbatches} microbatches; with pp {max(2, self.pp)}, {next_multiple(self)} would do"
            )

        _check_sharding(self)

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def shards(self) -> int:
        """Ranks that hold copies of the same parameters, over which ZeRO divides."""
        return self.dp * self.cp

    @property
    def divided(self) -> int:
        """Ranks over which ZeRO divides: all of the shards, or those of one group of hybrid sharding."""
        return self.shard_within or self.shards

    @property
    def node_ranks(self) -> int:
        """Ranks of dp x cp in a node. Axes are nested tp, cp, dp, so that those of one tp group take tp of its GPUs."""
        return self.per_node or min(self.shards, max(1, self.node_gpus // self.tp))

    @property
    def quantised(self) -> frozenset[str]:
        """The parts of ZeRO++ that are on."""
        words = {"none": (), "all": ZEROPP}.get(self.zeropp)
        return frozenset(self.zeropp.split("+") if words is None else words)

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.dp * self.micro_batch * self.microbatches * self.seq


def _check_sharding(layout: Layout) -> None:
    """Expert parallelism, hybrid sharding and ZeRO++, as far as no model is needed for it."""
    shards, within = layout.shards, layout.shard_within
    if shards % layout.ep:
        raise ValueError(_undivided(layout, "ep", layout.ep))
    if within and not layout.zero:
        raise ValueError(f"shard-within {within} needs ZeRO stage 1, 2 or 3, not 0")
    if within and shards % within:
        raise ValueError(_undivided(layout, "shard-within", within))
    if within and layout.ep > 1:
        raise ValueError("shard-within and ep are not counted together; ep 1 or shard-within 0 would do")
    if unknown := layout.quantised - set(ZEROPP):
        raise ValueError(f"zeropp is none, all, or of {', '.join(ZEROPP)}, joined by +; not {min(unknown)!r}")
    if layout.quantised and (layout.zero != 3 or within or layout.ep > 1):
        raise ValueError("ZeRO++ needs zero 3, shard-within 0 and ep 1")


def _check_nodes(layout: Layout) -> None:
    """ZeRO++ counts on whole nodes; how large they are is known once the device is."""
    if layout.quantised and layout.shards % layout.node_ranks:
        fit = [each for each in divisors(layout.shards) if each <= layout.node_ranks]
        raise ValueError(_undivided(layout, "per-node", layout.node_ranks, fit))


def _undivided(layout: Layout, name: str, size: int, fit: Sequence[int] = ()) -> str:
    fit, dp = listed(fit or divisors(layout.shards)), size // math.gcd(size, layout.cp)
    what = f"{name} {size} does not divide dp x cp = {layout.shards}"
    return f"{what}; {fit} would do, or --gpus {dp * layout.cp * layout.tp * layout.pp} (dp {dp})"


def divisors(number: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def spelled(field: str) -> str:
    return field.replace("_", "-")


def next_multiple(layout: Layout) -> int:
    pp = max(2, layout.pp)
    return pp * max(1, math.ceil(layout.microbatches / pp))


def data_parallel(gpus: int, tp: int = 1, pp: int = 1, cp: int = 1) -> int:
    """dp, so that dp x tp x pp x cp = gpus. ValueError names the numbers of GPUs that would do."""
    for name, size in (("tp", tp), ("pp", pp), ("cp", cp), ("gpus", gpus)):
        if size < 1:
            raise ValueError(f"{name} must be 1 or more, not {size}")
    model = tp * pp * cp
    if gpus % model:
        below, above = gpus // model * model, (gpus // model + 1) * model
        some = f"{below} or {above}" if below else str(above)
        raise ValueError(f"{gpus} gpus are no multiple of tp {tp} x pp {pp} x cp {cp} = {model}; {some} would do")
    return gpus // model


def check(shape: Shape, layout: Layout) -> None:
    """ValueError, one line with values that would do, where this model cannot be divided in this way."""
    if layout.tp not in (fit := tensor_parallel(shape)):
        raise ValueError(
            f"tp {layout.tp} does not divide the {shape.heads} heads, {shape.kv_heads} kv heads and feed-forward size "
            f"{shape.ffn} of {shape.name}; {listed(fit)} would do"
        )
    chunks = layout.pp * layout.interleave
    if chunks > shape.layers:
        what = f"pp {layout.pp}" + (f" x interleave {layout.interleave}" if layout.interleave > 1 else "")
        raise ValueError(f"{what} is more than the {shape.layers} layers of {shape.name}; 1 to {shape.layers} would do")
    if layout.interleave > 1 and shape.layers % chunks:
        fit = [v for v in range(1, shape.layers // layout.pp + 1) if shape.layers % (layout.pp * v) == 0]
        raise ValueError(
            f"interleaving needs equal chunks: pp {layout.pp} x interleave {layout.interleave} does not divide the "
            f"{shape.layers} layers of {shape.name}; interleave {listed(fit) if fit else '1'} would do"
        )
    check_experts(shape, layout, layout.ep)
    _check_nodes(layout)
    if shape.positions and layout.seq > shape.positions:
        raise ValueError(f"{shape.name} has {shape.positions} positions, too few for seq {layout.seq}")
    parts = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    if layout.seq % parts:
        below, above = layout.seq // parts * parts, (layout.seq // parts + 1) * parts
        how = f"cp {layout.cp}" + (f" x tp {layout.tp} with sequence parallelism" if parts > layout.cp else "")
        some = [each for each in (below, above) if each and not shape.positions or 0 < each <= shape.positions]
        some += ["no sequence parallelism"] if layout.seq % layout.cp == 0 else ["cp 1"]
        raise ValueError(f"seq {layout.seq} cannot be split into {parts} parts ({how}); {listed(some)} would do")


def check_experts(shape: Shape, layout: Layout, ep: int) -> None:
    """ValueError where a model's experts cannot be divided over ep of this layout's ranks."""
    fit = divisors(math.gcd(shape.experts, layout.shards)) if shape.experts else [1]
    if ep > 1 and (not shape.experts or shape.experts % ep):
        what = f"ep {ep} does not divide the {shape.experts} experts of {shape.name}"
        raise ValueError(f"{what}; {listed(fit)} would do")
    if ep > 1 and layout.shards % ep:
        raise ValueError(_undivided(layout, "ep", ep, fit))


def tensor_parallel(shape: Shape) -> list[int]:
    """Degrees of tensor parallelism that this model can be divided by; kv heads may be copied where they are fewer."""
    return [
        tp
        for tp in divisors(shape.heads)
        if shape.ffn % tp == 0 and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
    ]


def listed(values: Sequence[object]) -> str:
    """1, 2, 4 or 8."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
