"""What a widely read guide to tensor parallelism says, each claim with a verdict and the figure that it rests on.

Figures are of one decoder layer, forward and backward (`tensor_parallel`), on nodes of eight H100s. Left out: claims on
profilers, and on DeepSpeed's configuration, which is tried where DeepSpeed runs.
"""

from __future__ import annotations

from labkit.cost import activations, hardware
from labkit.cost.claims import Claim
from labkit.cost.groups import on_cluster
from labkit.cost.layout import Layout
from labkit.cost.moved import tensor_parallel
from labkit.cost.named import named
from labkit.cost.shapes import Shape, rank_layer_parameters
from labkit.cost.tensor_parallel import LayerTime, layer_time, llama_like

LARGE, SMALL, TOKENS, SEQ, NODE = "llama-3.1-8b", 512, 8192, 4096, "DGX H100"


def claims() -> tuple[Claim, ...]:
    """In the guide's order."""
    return _memory(), _all_gpus(), _optimized(), _larger_batches(), _faster()


def on_node(shape: Shape, ranks: int, nodes: int = 1, tokens: int = TOKENS) -> LayerTime:
    """A layer of `shape` on so many ranks, spread evenly over nodes of H100s."""
    cluster = hardware.cluster(NODE, nodes, per_node=ranks // nodes)
    return layer_time(shape, tokens, min(tokens, SEQ), cluster.node.device, on_cluster(cluster))


def speed(shape: Shape, ranks: int, nodes: int = 1, tokens: int = TOKENS) -> float:
    """Times the speed of one GPU."""
    return on_node(shape, 1, 1, tokens).time_s / on_node(shape, ranks, nodes, tokens).time_s


def kept_share(shape: Shape, ranks: int, sequence_parallel: bool = False) -> float:
    """Share of a layer's activations that each rank keeps (arXiv:2205.05198, equations 2 and 4)."""
    layouts = [Layout(tp=tp, seq=SEQ, sequence_parallel=sequence_parallel and tp > 1) for tp in (ranks, 1)]
    part, whole = (activations.kept(activations.layer_saved(shape, each), shape, each) for each in layouts)
    return part / whole


def _memory() -> Claim:
    shape = named(LARGE)
    weights = rank_layer_parameters(shape, 8) / rank_layer_parameters(shape, 1)
    kept, with_sequence = kept_share(shape, 8), kept_share(shape, 8, sequence_parallel=True)
    figure = f"{LARGE} on 8 GPUs: each keeps {weights:.1%} of a layer's parameters, but {kept:.0%} of its activations; "
    figure += f"with sequence parallel {with_sequence:.1%}"
    return Claim("each GPU keeps only its part, so less memory", "half right", figure)


def _all_gpus() -> Claim:
    shape = named(LARGE)
    more = 2 * speed(shape, 8) / speed(shape, 16, nodes=2)
    figure = f"16 GPUs in two nodes, {LARGE}: tp 8 with two data parallel ranks does {more:.2f} times as many tokens a "
    return Claim("tp_size is the number of GPUs that you have", "wrong", f"{figure}second as tp 16, gradients aside")


def _optimized() -> Claim:
    shape = named(LARGE)
    layout = Layout(tp=8, seq=SEQ, micro_batch=TOKENS // SEQ, sequence_parallel=False)
    sent = tensor_parallel(shape, layout, 0)["all_reduce"]
    figure = f"the cut itself takes four all_reduces per layer: {LARGE}, {sent / 1e9:.0f} GB a step from each of "
    figure += f"8 GPUs for {TOKENS:,} tokens; hiding a part of them (tp_overlap_comm) is off unless asked for"
    return Claim("DeepSpeed keeps the all_reduces' overhead small", "half right", figure)


def _larger_batches() -> Claim:
    shape = named(LARGE)
    few, many = (on_node(shape, 8, tokens=tokens).share for tokens in (512, 65536))
    figure = f"{LARGE} on 8 GPUs waits {few:.0%} of the time with 512 tokens, {many:.0%} with 65,536: bytes grow too"
    return Claim("a larger batch makes better use of the GPUs", "half right", figure)


def _faster() -> Claim:
    large, small = speed(named(LARGE), 8), speed(llama_like(SMALL), 8, tokens=2048)
    figure = f"8 GPUs run a layer of {LARGE} {large:.1f} times as fast as one, of hidden {SMALL} with 2,048 tokens "
    return Claim("tensor parallel trains faster", "half right", f"{figure}{small:.2f} times")
