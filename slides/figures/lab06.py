"""Figures of deck 06, Tensor parallel: a layer's matrices, bytes, recorded ranks, one layer replayed, the cost model.

Left out: times of this machine, and what torch and DeepSpeed record, which the notebook shows.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from labkit import launch
from labkit.cost import comm, hardware, states
from labkit.cost.named import named
from labkit.cost.shapes import attention_parameters, parameters
from labkit.cost.tensor_claims import kept_share, speed
from labkit.cost.tensor_parallel import llama_like
from labkit.labs import lab02
from labkit.record.prices import prices
from labkit.record.replay import replay
from labkit.view import curves, cut, plot, tensor
from slides import cells
from slides.drawing import Drawn, drawn
from slides.figures import parts

LAB, MODEL = "06", "llama-3.1-8b"
MANY = (1, 2, 4, 8, 16, 32)


def layer() -> Drawn:
    """One layer's matrices on four ranks."""
    return drawn(cut.layer(named(MODEL), 4, f"one layer of {MODEL} on 4 ranks", parts.wide(12, 4.0)))


def ways() -> Drawn:
    """Bytes that a rank sends for an MLP, gathered twice and summed once, recorded on four ranks."""
    fn = cells.function(LAB, "both_ways")
    fn.__globals__.update(Columns=_cell("ColumnParallelLinear"), Rows=_cell("RowParallelLinear"))
    (twice, _), (once, _) = launch(fn, 4, prints="quiet", backend="gloo")[0]
    names = ["all by columns:\ntwo all_gathers", "down by rows:\none all_reduce"]
    ax = curves.bars([("", [twice, once])], names, "bytes", "sent by each of 4 ranks, forward", parts.wide(8))
    return drawn(ax, times=f"{twice / once:.2f}")


def without_f() -> Drawn:
    """How far a rank's input gradient is from the true one, over the number of ranks."""
    many = (2, 4, 8)
    fn = cells.function(LAB, "input_gradient")
    fn.__globals__.update(Columns=_cell("ColumnParallelLinear"), Rows=_cell("RowParallelLinear"))
    ways = {"without f": lambda x, group: x, "with f": _cell("f")}
    found = {
        name: [launch(fn, n, enter, prints="quiet", backend="gloo")[0] for n in many] for name, enter in ways.items()
    }
    series = [(name, [round(off, 2) for off in values]) for name, values in found.items()]
    ax = curves.bars(series, [f"{n} ranks" for n in many], "% off", "input gradient of rank 0, an MLP", parts.wide(9))
    return drawn(ax, four=f"{found['without f'][1]:.0f}%")


def copies() -> Drawn:
    """Parameters of attention on all ranks together, in units of one copy."""
    shape = named(MODEL)
    held = [t * attention_parameters(shape, t) / attention_parameters(shape) for t in MANY]
    names = [f"{t} rank{'s' * (t > 1)}" for t in MANY]
    title = f"attention of {MODEL}, {shape.kv_heads} kv heads, all ranks together"
    ax = curves.bars([("", held)], names, "times one copy", title, parts.wide(9))
    return drawn(ax, most=f"{held[-1]:g}", heads=shape.kv_heads)


def logits() -> Drawn:
    """Bytes per token: logits gathered, and three numbers summed, over models."""
    models, t = ("llama-2-7b", "qwen2.5-7b", MODEL), 8
    gathered = [comm.sent_bytes("all_gather", 2 * named(name).vocab, t) for name in models]
    summed = [comm.sent_bytes("all_reduce", 3 * 4, t)] * len(models)
    names = [f"{name}\nvocabulary {named(name).vocab:,}" for name in models]
    series = [("logits gathered, bf16", gathered), ("three numbers, fp32", summed)]
    ax = curves.bars(series, names, "bytes per token", "sent by each of 8 ranks", parts.wide(10))
    ax.set_yscale("log")
    ax.set_ylim(1, 4e6)
    return drawn(ax, times=f"{gathered[-1] / summed[-1] / 1e3:.1f} thousand")


def dropped() -> Drawn:
    """Elements that are equal on two ranks after dropout with random numbers of their own, over the dropout rate."""
    rates = (0.0, 0.05, 0.1, 0.2, 0.5)
    equal = [100 * ((1 - p) ** 2 + p**2) for p in rates]
    names = [f"{p:.0%}" for p in rates]
    ax = curves.bars([("", equal)], names, "% equal", "x on two ranks, after one dropout of each rate", parts.wide(9))
    return drawn(ax, equal=f"{equal[2]:.0f}%")


def same_seed() -> Drawn:
    """Rank of a matrix whose shards were drawn by each rank, from one seed and from seeds of their own."""
    import torch

    width, many = 64, (1, 2, 4, 8)

    def rank_of(seeds: list[int]) -> int:
        shards = []
        for seed in seeds:
            torch.manual_seed(seed)
            shards.append(torch.randn(width, width // len(seeds)))
        return int(torch.linalg.matrix_rank(torch.cat(shards, dim=1)))

    with torch.random.fork_rng():
        one, own = ([rank_of([s * i for i in range(n)]) for n in many] for s in (0, 1))
    series = [("one seed", one), ("a seed each", own)]
    names = [f"{n} rank{'s' * (n > 1)}" for n in many]
    title = f"a {width} x {width} matrix drawn in shards of columns"
    ax = curves.bars(series, names, "rank of the matrix", title, parts.wide(9))
    return drawn(ax, four=one[2], width=width)


def one_node() -> Drawn:
    """One layer on eight A100s in one node, replayed."""
    played = _played("one node")
    ax = plot.timeline(_lanes("one node"), "rank 0 of 8 A100 with NVLink, hidden 1024", parts.wide(10, 2.4))
    return drawn(ax, share=f"{played.exposed_s(0) / played.time_s:.0%}")


def two_nodes() -> Drawn:
    """The same in one node and in two."""
    lanes = [lane for name in ("one node", "two nodes") for lane in _lanes(name)]
    ax = plot.timeline(lanes, "rank 0 of 8 A100, 200 Gbit/s per GPU between nodes", parts.wide(10, 3.4))
    times = _played("two nodes").time_s / _played("one node").time_s
    return drawn(ax, times=f"{times:.2f}")


def small_models() -> Drawn:
    """How many times as fast as one GPU a layer is, over its hidden size, by ranks."""
    setting = tensor.Setting(4096, "H100", 8, "NVLink 4", "InfiniBand NDR")
    series = [(f"{n} ranks", tensor.HIDDEN, tensor.faster(setting, n), "line") for n in tensor.RANKS]
    series.append(("one GPU", tensor.HIDDEN, [1.0] * len(tensor.HIDDEN), "dashed"))
    ax = curves.lines(series, "hidden size", "times one GPU's speed", "H100, 8 in a node, 4096 tokens", parts.wide(9))
    curves.doubling_axis(ax, tensor.HIDDEN)
    ax.set_yscale("log", base=2)
    ax.set_ylim(1 / 4, 16)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}")
    small, large = tensor.faster(setting, 8)[0], tensor.faster(setting, 8)[-1]
    return drawn(ax, small=f"{small:.2g}", large=f"{large:.2g}")


def more_tokens() -> Drawn:
    """Share of a layer's time that is communication, over tokens, by wires."""
    wires = {"NVLink 4": ("H100", 8, "NVLink 4"), "two nodes": ("H100", 4, "NVLink 4"), "PCIe 5": ("H100", 8, "PCIe 5")}
    at, series = tensor.HIDDEN.index(4096), []
    for name, (device, per_node, within) in wires.items():
        settings = [tensor.Setting(n, device, per_node, within, "InfiniBand NDR") for n in tensor.TOKENS]
        series.append((name, tensor.TOKENS, [100 * tensor.times(each, 8)[at].share for each in settings], "line"))
    title = "8 H100, a layer of hidden 4096"
    ax = curves.lines(series, "tokens", "% of the time communicating", title, parts.wide(9))
    curves.doubling_axis(ax, tensor.TOKENS)
    ax.set_ylim(0, 100)
    first, last = series[0][2][0], series[0][2][-1]
    return drawn(ax, few=f"{first:.0f}%", many=f"{last:.0f}%")


def kept() -> Drawn:
    """Share of a layer's activations that a rank keeps, with and without sequence parallel."""
    shape, many = named(MODEL), (1, 2, 4, 8)
    series = [
        (name, [100 * kept_share(shape, t, sequence) for t in many])
        for name, sequence in (("tensor parallel", False), ("and sequence parallel", True))
    ]
    names = [f"{t} rank{'s' * (t > 1)}" for t in many]
    ax = curves.bars(series, names, "% of all", f"activations of a layer of {MODEL} on a rank", parts.wide(9))
    return drawn(ax, plain=f"{series[0][1][-1]:.0f}%", both=f"{series[1][1][-1]:.1f}%")


def balance() -> Drawn:
    """Blocks of scores that each of four ranks computes, with one chunk of the sequence and with two."""
    n = 4
    one = [4 * rank + 3 for rank in range(n)]  # halves i = 2r and 2r + 1: i + 1 blocks each
    two = [(rank + 1) + (2 * n - rank) for rank in range(n)]
    series = [("one long chunk", one), ("the first and the last", two)]
    names = [f"rank {rank}" for rank in range(n)]
    ax = curves.bars(series, names, "blocks", f"causal attention, {2 * n} chunks on {n} ranks", parts.wide(9))
    return drawn(ax, most=max(one), even=two[0])


def sixteen() -> Drawn:
    """Speed of sixteen GPUs in two nodes, all tensor parallel, and eight of them with two data parallel ranks."""
    models = (512, 2048, MODEL, "llama-3.1-70b")
    shapes = [llama_like(each) if isinstance(each, int) else named(each) for each in models]
    series = [("tp on both nodes", [speed(shape, 16, nodes=2) for shape in shapes])]
    series.append(("tp in a node, dp between", [2 * speed(shape, 8) for shape in shapes]))
    names = [f"hidden {each}" if isinstance(each, int) else each.replace("-3.1", "\n3.1") for each in models]
    ax = curves.bars(series, names, "times one GPU's speed", "a layer, 16 H100 in two nodes", parts.wide(10))
    more = [after / before for before, after in zip(*(values for _, values in series), strict=True)]
    return drawn(ax, more=f"{more[2]:.1f}")


def too_large() -> Drawn:
    """States of three models beside the memory of a node."""
    models, each = (MODEL, "llama-3.1-70b", "llama-3.1-405b"), states.per_parameter().total
    sizes = [each * parameters(named(name)) / 1e12 for name in models]
    ax = curves.bars([("", sizes)], models, "TB", "weights, gradients and Adam's state, bf16", parts.wide(9))
    node = hardware.node("DGX H100")
    room = node.count * node.device.memory_bytes / 1e12
    ax.axhline(room, color=plot.COLOURS["ink"], linewidth=0.8)
    return drawn(ax, most=f"{sizes[-1]:.1f} TB", room=f"{room:.2f} TB")


@functools.cache
def _cell(name: str) -> Any:
    """What the notebook's solved cell defines, with those of its names that other cells define."""
    found = cells.function(LAB, name)
    space = (found.__init__ if isinstance(found, type) else found).__globals__
    needs = {
        "ParallelAttention": {"f": "f", "g": "g"},
        "CutMLP": {"Columns": "ColumnParallelLinear", "Rows": "RowParallelLinear", "enter": "f"},
        "layer_step": {"Heads": "ParallelAttention", "CutMLP": "CutMLP"},
    }
    space.update({here: _cell(there) for here, there in needs.get(name, {}).items()})
    return found


@functools.cache
def _recorded() -> tuple:
    """Records of a layer of hidden 1024 on eight ranks, and where their backward begins."""
    found = launch(_cell("layer_step"), 8, 1024, 1024, 0, prints="quiet", backend="gloo")
    records, backward, _ = zip(*found, strict=True)
    return records, backward[0]


@functools.cache
def _played(name: str) -> Any:
    places = {"one node": {"num_nodes": 1}, "two nodes": {"num_nodes": 2, "per_node": 4}}
    return replay(_recorded()[0], prices(hardware.cluster("DGX A100", **places[name]), "tf32"))


def _lanes(name: str) -> list:
    return lab02.lanes(SimpleNamespace(backward=_recorded()[1]), _played(name), name)
