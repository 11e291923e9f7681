"""Figures of deck 02, Data parallel: steps of four real ranks, recorded and replayed on described GPUs.

Left out: times of this machine, which the notebook measures beside formula and replay.
"""

from __future__ import annotations

import functools
from math import ceil
from typing import Any

from labkit import launch, run_ranks
from labkit.cost import groups, hardware
from labkit.labs import lab02
from labkit.labs.lab02 import recut, shards
from labkit.record.prices import prices
from labkit.record.replay import Replay, replay
from labkit.view import curves, plot
from slides import cells
from slides.drawing import Drawn, drawn
from slides.figures import parts

LAB, RANKS, BUCKET = "02", 4, 2**21
RANK_NAMES = [f"rank {rank}" for rank in range(RANKS)]


def overlapped() -> Drawn:
    """A step with torch's DistributedDataParallel."""
    step = _with_torch()
    lanes = lab02.lanes(step, _on_t4s(step), "rank 0")
    return drawn(plot.timeline(lanes, "DistributedDataParallel, replayed on 4 T4 over PCIe 3", parts.wide(9, 2.4)))


def one_batch() -> Drawn:
    """Which rows of a single worker's batch each of four ranks has."""
    from labkit.model.text import batches

    whole, _ = next(batches(4 * RANKS, 64))
    rows = []
    for rank in range(RANKS):
        tokens, _ = next(batches(4, 64, rank=rank, world_size=RANKS))
        rows.append([row for row in range(len(whole)) if any((whole[row] == mine).all() for mine in tokens)])
    return drawn(plot.shards(rows, len(whole), "rows of one batch"), each=len(rows[0]), rows=len(whole))


def apart() -> Drawn:
    """How far apart all the weights of ranks 0 and 1 get when gradients are not averaged."""
    steps = cells.value(LAB, "STEPS")
    alone = launch(_train(), RANKS, steps, 4, prints="quiet")
    one, other = alone[0][1], alone[1][1]
    percent = [0.0, *(100 * (one - other).norm(dim=1) / one.norm(dim=1)).tolist()]
    done, title = range(0, steps + 1, steps // (len(percent) - 1)), "all weights of ranks 0 and 1, as one vector"
    ax = curves.lines([("", done, percent, "line")], "steps done", "apart (%)", title, parts.wide(8))
    return drawn(ax, steps=steps, apart=f"{percent[-1]:.0f}%")


def averaged() -> Drawn:
    """Gradients of one parameter before and after averaging; one rank took no part in it."""
    before = [[4, 8], [12, 20], None, [24, 32]]
    after = launch(_mean, RANKS, rank_args=[(row,) for row in before], prints="quiet", backend="gloo")
    return drawn(plot.grids(before, after, "gradient of one parameter: what is due"))


def _mean(row: list | None) -> list:
    """Runs in a rank."""
    import torch
    import torch.distributed as dist

    grad = torch.tensor(row or [0, 0])
    dist.all_reduce(grad)
    return (grad // dist.get_world_size()).tolist()


def same_curve() -> Drawn:
    """The loss of one worker, and the mean loss of four whose gradients are averaged."""
    steps = cells.value(LAB, "STEPS")
    serial, _ = launch(_train(), 1, steps, 4 * RANKS, prints="quiet")[0]
    found = launch(_train(), RANKS, steps, 4, lab02.torchs_average, prints="quiet")
    means = [sum(at_step) / RANKS for at_step in zip(*(losses for losses, _ in found), strict=True)]
    series = [("one worker", range(steps), serial, "line"), ("mean of four", range(steps), means, "points")]
    ax = curves.lines(series, "step", "loss (nats per byte)", "", parts.wide(8), from_zero=False)
    return drawn(ax, first=f"{serial[0]:.1f}", last=f"{serial[-1]:.1f}")


def naive() -> Drawn:
    """A step that averages after backward, one all_reduce a parameter."""
    step, played = _naive(), _on_t4s(_naive())
    ax = plot.timeline(lab02.lanes(step, played, "rank 0"), "replayed on 4 T4 over PCIe 3", parts.wide(9, 2.4))
    share = f"{played.exposed_s(0) / played.time_s:.0%}"
    return drawn(ax, share=share, whole=curves.as_time(played.time_s), size=f"{step.num_bytes / 1e6:.0f} MB")


def ready() -> Drawn:
    """How many bytes of gradients are there at which moment of backward, on a T4."""
    found = recut.backward_of(_naive(), hardware.device("T4"))
    length_s = found.compute_s - found.forward_s
    when = sorted(zip(found.ready_s, found.num_bytes, strict=True))
    percent, done = [100 * (at_s - found.forward_s) / length_s for at_s, _ in when], 0
    held = []
    for _, num_bytes in when:
        done += num_bytes
        held.append(done / 1e6)
    half = next(at for at, size in zip(percent, held, strict=True) if size >= held[-1] / 2)
    ax = curves.lines([("", percent, held, "points")], "backward (%)", "gradients ready (MB)", "on a T4", parts.wide(8))
    return drawn(ax, first=f"{percent[0]:.0f}%", half=f"{half:.0f}%")


def bucketed() -> Drawn:
    """One by one, in buckets, and by torch, on one axis."""
    steps = {"one by one": _naive(), "buckets": _bucketed(), "torch's DDP": _with_torch()}
    played = {name: _on_t4s(step) for name, step in steps.items()}
    lanes = [lane for name, step in steps.items() for lane in lab02.lanes(step, played[name], name)]
    ax = plot.timeline(lanes, "rank 0 of 4 T4 over PCIe 3, buckets of 2 MiB", parts.wide(9, 3.3))
    left = played["buckets"].exposed_s(0) / played["one by one"].exposed_s(0)
    times = {key: curves.as_time(played[name].time_s) for key, name in (("before", "one by one"), ("after", "buckets"))}
    return drawn(ax, left=f"{left:.0%}", **times)


def formula() -> Drawn:
    """The chain formula beside the replay, for three ways of averaging."""
    cluster = _t4s()
    steps = {"one by one": (_naive(), None), "buckets": (_bucketed(), BUCKET), "torch's DDP": (_with_torch(), BUCKET)}
    by_formula = [lab02.by_formula(_naive(), cluster, size) * 1e3 for _, size in steps.values()]
    replayed = [_on_t4s(step).time_s * 1e3 for step, _ in steps.values()]
    series = [("formula", by_formula), ("replay", replayed)]
    ax = curves.bars(series, list(steps), "ms a step", "4 T4 over PCIe 3, buckets of 2 MiB")
    return drawn(ax, off=f"{max(abs(f / r - 1) for f, r in zip(by_formula, replayed, strict=True)):.0%}")


def bucket_sizes() -> Drawn:
    """Time of a step by the size of its buckets, over two links."""
    device, sizes = hardware.device("T4"), [2**power for power in (16, 18, 20, 21, 22, 23, 24)]
    backward, series = recut.backward_of(_naive(), device), []
    for name in ("PCIe 3", "100 GbE"):
        group = groups.on_link(RANKS, hardware.link(name))
        series.append((name, [recut.recut(backward, size, device, group).time_s * 1e3 for size in sizes]))
    names = [curves.as_size(size).replace(" ", "\n") for size in sizes]
    ax = curves.bars(series, names, "ms a step", "4 T4, by size of a bucket", parts.wide(9))
    for label, time_ms in zip(ax.texts, (*series[0][1], *series[1][1]), strict=True):
        label.set_text(f"{time_ms:.1f}")
    slow = series[1][1]
    best = sizes[slow.index(min(slow))]
    return drawn(ax, best=curves.as_size(best), least=f"{min(slow):.1f} ms", small=f"{slow[0]:.1f} ms")


def larger() -> Drawn:
    """all_reduce over computing for a small and a large model, more ranks, and more tokens."""
    ratio = cells.function(LAB, "all_reduce_to_compute")
    ratio.__globals__["t4s"] = _t4s()
    small, large = ratio(3e6, 512), ratio(3e9, 512)
    found = [small, large, ratio(3e9, 512, world_size=8), ratio(3e9, 4096)]
    names = ["3 million\nparameters", "3 billion\nparameters", "3 billion,\n8 ranks", "3 billion,\n8 times the tokens"]
    ax = curves.bars([("", found)], names, "all_reduce / computing", "T4s over PCIe 3, 512 tokens a GPU", parts.wide(9))
    return drawn(ax, factor=f"{large / small:.2f}", tokens=f"{large / found[3]:.0f}")


def counted() -> Drawn:
    """Bytes that count in the microbatches of four ranks."""
    counts = [[int((targets != -100).sum()) for _, targets in mine] for mine in lab02.pictures.pieces()]
    series = [(f"microbatch {at}", [mine[at] for mine in counts]) for at in range(2)]
    return drawn(curves.bars(series, RANK_NAMES, "bytes that count"), short=counts[0][0], long=counts[0][1])


def outweighed() -> Drawn:
    """What a byte weighs in a mean of means, over what it should weigh."""
    of_ranks = lab02.pictures.pieces()
    counts = [[int((targets != -100).sum()) for _, targets in mine] for mine in of_ranks]
    mean = sum(map(sum, counts)) / sum(map(len, counts))
    series = [(f"microbatch {at}", [mean / mine[at] for mine in counts]) for at in range(2)]
    ax = curves.bars(series, RANK_NAMES, "weight of a byte", "in a mean of means; 1 is right")
    fn = cells.function(LAB, "mean_of_means")
    fn.__globals__["average"] = lab02.torchs_average
    percent, *_ = lab02.accumulate_picture(fn, of_ranks)
    return drawn(ax, times=f"{counts[0][1] / counts[0][0]:g}", off=f"{percent:.0f}%")


def synchronised() -> Drawn:
    """Gradients that torch's DDP sends a step, with and without no_sync, by number of microbatches."""
    numbers = (1, 2, 4, 8)
    found = {wait: [launch(_sent, 2, n, wait, prints="quiet")[0] for n in numbers] for wait in (False, True)}
    series = [("in every backward", found[False]), ("once a step", found[True])]
    names = [f"{n} micro-\nbatch{'es' * (n > 1)}" for n in numbers]
    return drawn(curves.bars(series, names, "gradients sent", "recorded on 2 ranks"), most=f"{found[False][-1]:g}")


def _sent(number: int, wait: bool) -> float:
    """Runs in a rank: bytes all_reduced for `number` microbatches over those of one gradient."""
    import contextlib

    import torch

    import labkit

    model = torch.nn.Linear(64, 64)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(torch.ones(1, 64)).sum().backward()  # the first backward also settles the buckets
    with labkit.Trace() as trace:
        for at in range(number):
            with wrapped.no_sync() if wait and at < number - 1 else contextlib.nullcontext():
                wrapped(torch.ones(1, 64)).sum().backward()
    sent = sum(c.num_bytes for c in trace.record.collectives if c.op == "all_reduce")
    return sent / sum(p.nbytes for p in model.parameters())


def went_home() -> Drawn:
    """Calls of four ranks of which three have no last batch."""
    one_epoch = cells.function(LAB, "one_epoch")
    one_epoch.__globals__["average"] = lab02.torchs_average
    sizes = [(2, 2, 2), (2, 2, 0), (2, 2, 0), (2, 2, 0)]
    outcome = run_ranks(one_epoch, RANKS, rank_args=sizes, prints="quiet", backend="gloo")
    held = []
    for rank, ledger in enumerate(outcome.ledgers):
        for entry in ledger:
            kind = "communication" if entry.state == "done" else "waiting"
            held.append((rank, entry.sequence, entry.sequence + 1, kind, f"{entry.op} #{entry.sequence}"))
    ax = plot.spans(held, "what each rank called, two samples a rank and step")
    ax.set(xticks=[], xlabel="calls, in order")
    return drawn(ax, said=parts.told(outcome.cause.sentence))


def handed_out() -> Drawn:
    """Which samples torch's DistributedSampler gives each rank."""
    from torch.utils.data import DistributedSampler

    rows = [list(DistributedSampler(range(18), RANKS, rank)) for rank in range(RANKS)]
    every = sum(rows, [])
    ax = plot.shards(rows, 18, "DistributedSampler: 18 samples, 4 ranks")
    return drawn(ax, every=len(every), samples=len(set(every)), twice=len(every) - len(set(every)))


def left_over() -> Drawn:
    """Samples of all ranks in each step of an epoch."""
    samples, whole = 18, 2 * RANKS
    sizes = [min(whole, samples - start) for start in range(0, samples, whole)]
    names = [f"step {at}" for at in range(len(sizes))]
    ax = curves.bars([("", sizes)], names, "samples, all ranks", "18 samples, 4 ranks, 2 a rank and step")
    return drawn(ax, left=sizes[-1], ranks=RANKS)


def starved() -> Drawn:
    """What a step takes when its data come from slow storage, by number of workers: a model, nothing is measured."""
    import inspect

    asked = inspect.signature(lab02.load_with).parameters
    reads = (shards.SLOW_EVERY - 1 + shards.SLOWER) / shards.SLOW_EVERY  # unpacking is left out
    load_ms = asked["batch"].default * asked["read_s"].default * 1e3 * reads
    compute_ms = _on_t4s(_with_torch()).time_s * 1e3
    enough = ceil(load_ms / compute_ms)
    workers = (0, 1, 2, 4, enough)
    waits = [load_ms if n == 0 else max(0.0, load_ms / n - compute_ms) for n in workers]
    series = [("trains", [compute_ms] * len(workers)), ("waits for data", waits)]
    names = [f"{n or 'no'} worker{'s' * (n != 1)}" for n in workers]
    title = f"{load_ms:.3g} ms of reads a batch, shared by the workers"
    ax = curves.bars(series, names, "ms a step", title, parts.wide(9))
    return drawn(ax, share=f"{load_ms / (load_ms + compute_ms):.0%}", enough=enough)


def efficiency() -> Drawn:
    """Share of the time in which T4s compute, by number of ranks, from the recorded step."""
    many, device, node = (1, 2, 4, 8, 16, 32, 64), hardware.device("T4"), 8
    ways = (("one by one, PCIe 3", "PCIe 3", None), ("buckets, PCIe 3", "PCIe 3", BUCKET))
    series = []
    for label, wire, size in (*ways, ("buckets, 100 GbE", "100 GbE", BUCKET)):
        on = tuple(n for n in many if n <= node or wire != "PCIe 3")
        shares = lab02.efficiencies(_naive(), device, hardware.link(wire), on, size)
        series.append((label, on, [100 * share for share in shares], "line"))
    ax = curves.lines(series, "ranks", "efficiency (%)", "T4s, buckets of 2 MiB", parts.wide(9))
    curves.doubling_axis(ax, many)
    ends = [f"{held[-1]:.0f}%" for _, _, held, _ in series]
    return drawn(ax, node=node, ranks=many[-1], naive=ends[0], pcie=ends[1], ethernet=ends[2])


def guide() -> Drawn:
    """What the numbers of a published configuration multiply to, by number of ranks."""
    told, ranks = cells.value(LAB, "guide"), (1, 4, 8)
    said = told["train_batch_size"]
    found = [told["train_micro_batch_size_per_gpu"] * told["gradient_accumulation_steps"] * n for n in ranks]
    series = [("train_batch_size", [said] * len(ranks)), ("microbatch x\nsteps x ranks", found)]
    names = [f"{n} GPU{'s' * (n > 1)}" for n in ranks]
    ax = curves.bars(series, names, "samples a step", ax=parts.wide(9))
    return drawn(ax, said=said, found=found[-1])


def copies() -> Drawn:
    """Bytes that four ranks hold for a model of a billion parameters under AdamW in fp32."""
    each = {"parameters": 4, "gradients": 4, "optimizer": 8}
    series = [(name, [num_bytes] * RANKS) for name, num_bytes in each.items()]
    ax = curves.bars(series, RANK_NAMES, "GB", "a billion parameters, fp32, AdamW: every rank holds the same")
    return drawn(ax, each=f"{sum(each.values())} GB", all=f"{RANKS * sum(each.values())} GB")


@functools.cache
def _naive() -> Any:
    return lab02.record_step(_itself, cells.function(LAB, "average_gradients"))


@functools.cache
def _bucketed() -> Any:
    wrapper = cells.function(LAB, "BucketedDDP")
    return lab02.record_step(lambda model: wrapper(model, BUCKET), lambda wrapped: wrapped.finish())


@functools.cache
def _with_torch() -> Any:
    return lab02.record_step(lambda model: lab02.TorchDDP(model, BUCKET), _itself)


def _itself(model: Any) -> Any:
    return model


def _train() -> Any:
    return cells.function(LAB, "train")


def _t4s() -> Any:
    return hardware.cluster("T4", per_node=RANKS)


def _on_t4s(step: Any) -> Replay:
    return replay(step.records, prices(_t4s()))
