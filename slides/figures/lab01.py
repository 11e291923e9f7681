"""Figures of deck 01, The price of a collective: the cost model on published links, and messages of real ranks.

Left out: this machine's own times, which the notebook measures; nothing here reads a clock.
"""

from __future__ import annotations

import random

from labkit import run_ranks
from labkit.check import evidence
from labkit.cost import comm, groups, hardware
from labkit.labs import lab01
from labkit.record.prices import prices
from labkit.record.replay import replay
from labkit.view import curves, plot
from slides import cells
from slides.drawing import Drawn, drawn
from slides.figures import parts

LAB, MIB = "01", 2**20
SIZES = [2**power for power in range(10, 31)]
WIRES = ("NVLink 4", "PCIe 4", "InfiniBand NDR", "100 GbE", "10 GbE")
RANK_NAMES = [f"rank {rank}" for rank in range(4)]


def three_wires() -> Drawn:
    """One all_reduce on eight ranks over three published links."""
    lines, links = [], ("NVLink 4", "PCIe 4", "10 GbE")
    for number, name in enumerate(links):
        times = [comm.time_s("all_reduce", size, 8, hardware.link(name)) for size in SIZES]
        label = f"{name}: 1 MiB in {curves.as_time(times[10])}"
        lines.append(curves.Curve(label, SIZES, times, number=number))
    fast, slow = (curves.as_time(line.values[10]) for line in (lines[0], lines[-1]))
    return drawn(curves.times(lines, "all_reduce on 8 ranks, ring", parts.wide(9)), fast=fast, slow=slow)


def alpha_and_beta() -> Drawn:
    """A message over 10 GbE: what is paid once, what is paid a byte, and their sum."""
    link = hardware.link("10 GbE")
    whole = [link.alpha_s + size / link.bandwidth for size in SIZES]
    lines = [
        curves.Curve("alpha + beta S", SIZES, whole),
        curves.Curve("alpha alone", SIZES, [link.alpha_s] * len(SIZES), "dashed", 1),
        curves.Curve("beta S alone", SIZES, [size / link.bandwidth for size in SIZES], "dashed", 2),
    ]
    ax = curves.times(lines, "one message on 10 GbE", parts.wide(9))
    alpha, beta = curves.as_time(link.alpha_s), f"{1e9 / link.bandwidth:g} ns"
    return drawn(ax, alpha=alpha, beta=beta, bytes=f"{MIB // 1024:,}", ratio=f"{whole[10] / whole[0]:.2g}")


def star_sent() -> Drawn:
    """What each of four ranks sends when one adds for all."""
    sent, _ = lab01.sent_picture(cells.function(LAB, "star"), 4)
    ax = curves.bars([("star", sent)], RANK_NAMES, "sent, in tensors", "star, 4 ranks")
    return drawn(ax, hub=f"{sent[0]:g}", thousand=1000 - 1)


def ring_messages() -> Drawn:
    """Messages of a sum round the ring, on four ranks."""
    seen = evidence.observe(cells.function(LAB, "ring_all_reduce"), 4, rank_args=_ones(4), backend="gloo")
    messages = evidence.timeline(seen).messages
    each = sum(1 for _, _, source, _ in messages if source == 0)
    ax = plot.messages(messages, 4, "one chunk in each message")
    return drawn(ax, ranks=4, each=each)


def sent() -> Drawn:
    """What each of four ranks sends, by star and by ring."""
    star, _ = lab01.sent_picture(cells.function(LAB, "star"), 4)
    ring, _ = lab01.sent_picture(cells.function(LAB, "ring_all_reduce"), 4)
    ax = curves.bars([("star", star), ("ring", ring)], RANK_NAMES, "sent, in tensors", "")
    many = comm.sent_bytes("all_reduce", 1.0, 1000)
    return drawn(ax, four=f"{ring[0]:g}", thousand=f"{many:.3f}")


def two_bandwidths() -> Drawn:
    """algbw and busbw of one all_reduce over more and more ranks on the same link."""
    link, counts = hardware.link("NVLink 4"), (2, 4, 8, 16, 64)
    times = {n: comm.time_s("all_reduce", 2**30, n, link) for n in counts}
    algbw = [comm.algbw(2**30, times[n]) / 1e9 for n in counts]
    busbw = [comm.busbw("all_reduce", 2**30, n, times[n]) / 1e9 for n in counts]
    names = [f"{n} ranks" for n in counts]
    series, title = [("algbw", algbw), ("busbw", busbw)], "all_reduce of 1 GiB, NVLink 4"
    ax = curves.bars(series, names, "GB/s", title, parts.wide(9))
    return drawn(ax, algbw=f"{algbw[-1]:.0f}", busbw=f"{busbw[-1]:.0f}", wire=f"{link.bandwidth / 1e9:g}")


def six_algbws() -> Drawn:
    """S over time of six collectives on one link: the wire is the same, the number is not."""
    link = hardware.link("NVLink 4")
    found = [comm.algbw(2**30, comm.time_s(op, 2**30, 8, link)) / 1e9 for op in lab01.OPS]
    names = [op.replace("_", "_\n", 1) for op in lab01.OPS]
    ax = curves.bars([("algbw", found)], names, "algbw (GB/s)", "1 GiB on 8 ranks, NVLink 4", parts.wide(9))
    return drawn(ax, wire=f"{link.bandwidth / 1e9:g}")


def ceiling() -> Drawn:
    """busbw of six collectives over size on a published link."""
    link, lines = hardware.link("NVLink 4"), []
    for number, op in enumerate(lab01.OPS):
        rates = [comm.busbw(op, size, 8, comm.time_s(op, size, 8, link)) for size in SIZES]
        lines.append(curves.Curve(op, SIZES, rates, "line" if number < 3 else "dashed", number))
    ax = curves.bandwidths(lines, "8 ranks on NVLink 4, from the cost model", parts.wide(9))
    small, large = (lines[0].values[at] / 1e9 for at in (0, -1))
    return drawn(ax, small=f"{small:.2g} GB/s", large=f"{large:.0f} GB/s")


def not_waited() -> Drawn:
    """An all_reduce that is started and waited for, replayed on four T4s: the call, and the work."""
    played = replay(parts.recorded(_started, 4), prices(hardware.cluster("T4", per_node=4)))
    work = next(span for span in played.spans if span.rank == 0 and span.kind == "communication")
    waits = [span for span in played.spans if span.rank == 0 and span.kind == "wait"]
    held = [(0, span.start_s * 1e3, span.end_s * 1e3, "waiting", "work.wait()") for span in waits]
    held.append((1, work.start_s * 1e3, work.end_s * 1e3, "communication", "all_reduce of 64 MiB"))
    ax = plot.spans(held, "rank 0, replayed on four T4s over PCIe 3")
    ax.set_yticks([0, 1], ["your code", "the wire"])
    ax.set(xlabel="time (ms)", xlim=(0, None))
    return drawn(ax, work=curves.as_time(work.time_s))


def _started() -> None:
    """Runs in a rank."""
    import torch
    import torch.distributed as dist

    work = dist.all_reduce(torch.ones(2**24), async_op=True)
    work.wait()


def shorter() -> Drawn:
    """What four ranks pass to one all_reduce when the last batch of one is shorter."""
    outcome = run_ranks(cells.function(LAB, "shorter_on_rank_three"), 4, backend="gloo", prints="quiet")
    elements = [ledger[0].num_bytes // 4 for ledger in outcome.ledgers]
    ax = curves.bars([("elements", elements)], RANK_NAMES, "elements", "passed to the same all_reduce")
    for label, count in zip(ax.texts, elements, strict=True):
        label.set_text(f"{count:,}")
    return drawn(ax, said=parts.told(outcome.cause.sentence))


def delayed() -> Drawn:
    """Repetitions of which two in five were delayed, and the line that least squares lays through them."""
    import numpy

    rng, line = random.Random(1), comm.line("all_reduce", groups.on_link(4, hardware.link("10 GbE")))
    sizes, times = [], []
    for size in SIZES[0:17:2]:
        late = set(rng.sample(range(5), 2))
        sizes += [size] * 5
        times += [line.time_s(size) * (rng.uniform(3, 30) if at in late else rng.gauss(1, 0.02)) for at in range(5)]
    beta_s, alpha_s = numpy.polyfit(sizes, times, 1)
    bent = [t if t > 0 else float("nan") for t in (alpha_s + beta_s * size for size in SIZES[:17])]
    lines = [
        curves.Curve("the wire", SIZES[:17], [line.time_s(size) for size in SIZES[:17]], "dashed", 2),
        curves.Curve("least squares", SIZES[:17], bent, "line", 5),
        curves.Curve("repetitions", sizes, times, "points", 0),
    ]
    ax = curves.times(lines, "all_reduce on 4 ranks over 10 GbE, two of five repetitions delayed", parts.wide(9))
    ax.set_ylim(bottom=line.latency_s / 2)
    return drawn(ax, alpha=f"\N{MINUS SIGN}{-alpha_s * 1e3:.0f} ms", true=curves.as_time(line.latency_s))


def halves() -> Drawn:
    """Where latency is half of the time, on three links."""
    lines, found = [], {}
    for number, name in enumerate(("NVLink 4", "PCIe 4", "10 GbE")):
        line = comm.line("all_reduce", groups.on_link(8, hardware.link(name)))
        half = line.latency_s / line.s_per_byte
        found[name.split()[0].lower().replace("10", "ten")] = curves.as_size(half).replace(".0 ", " ")
        lines.append(curves.Curve(name, SIZES, [line.time_s(size) for size in SIZES], "line", number))
        lines.append(curves.Curve("", [half], [line.time_s(half)], "points", number))
    ax = curves.times(lines, "all_reduce on 8 ranks; marked: half of the time is latency", parts.wide(9))
    short = {name: f"{float(size.split()[0]):.3g} {size.split()[1]}" for name, size in found.items()}
    return drawn(ax, **short)


def wires() -> Drawn:
    """1 MiB among 64 ranks on five published links, by ring and by tree."""
    times = {}
    for name in WIRES:
        group = groups.on_link(64, hardware.link(name))
        times[name] = [comm.group_time_s("all_reduce", MIB, group, a) * 1e3 for a in ("ring", "tree")]
    series = [("ring", [times[name][0] for name in WIRES]), ("tree", [times[name][1] for name in WIRES])]
    names = [name.replace(" ", "\n") for name in WIRES]
    ax = curves.bars(series, names, "time (ms)", "all_reduce of 1 MiB, 64 ranks", parts.wide(9))
    return drawn(ax, ring=f"{times['10 GbE'][0]:.2f} ms", nvlink=curves.as_time(times["NVLink 4"][0] / 1e3), ranks=64)


def crossing() -> Drawn:
    """Ring and tree over size among 64 ranks on 10 GbE."""
    group = groups.on_link(64, hardware.link("10 GbE"))
    lines = []
    for number, algorithm in enumerate(("ring", "tree")):
        times = [comm.group_time_s("all_reduce", size, group, algorithm) for size in SIZES]
        lines.append(curves.Curve(algorithm, SIZES, times, number=number))
    ax = curves.times(lines, "all_reduce on 64 ranks, 10 GbE", parts.wide(9))
    equal = comm.crossover_bytes("all_reduce", group, "ring", "tree")
    size = f"{equal / MIB:.0f} MiB"
    return drawn(ax, equal=size, messages=2 * (64 - 1))


def log_line() -> Drawn:
    """The rows of the example log, and the line through them."""
    rows = lab01.nccl_log.read(lab01.nccl_log.example())
    sizes, times = [row.num_bytes for row in rows], [row.time_s for row in rows]
    alpha_s, beta_s = cells.function(LAB, "fit_alpha_beta")(sizes, times)
    lines = [
        curves.Curve("alpha + beta S", sizes, [alpha_s + beta_s * size for size in sizes]),
        curves.Curve("rows of the log", sizes, times, "points", 1),
    ]
    wire = comm.link_of("read off the log", "all_reduce", 8, alpha_s, beta_s)
    ax = curves.times(lines, "an example log of all_reduce_perf: from the cost model, not measured", parts.wide(9))
    return drawn(ax, alpha=curves.as_time(alpha_s), wire=f"{wire.bandwidth / 1e9:.3g} GB/s")


def two_kinds() -> Drawn:
    """Bandwidth inside a node of eight T4s, and of network cards between such nodes."""
    inside = hardware.node("8xT4").intra
    links = [inside, *(hardware.link(name) for name in ("100 GbE", "25 GbE", "10 GbE"))]
    rates = [link.bandwidth / 1e9 for link in links]
    names = [f"inside a node,\n{inside.name}", *(f"between nodes,\n{link.name}" for link in links[1:])]
    ax = curves.bars([("", rates)], names, "GB/s, one direction", "", parts.wide(9))
    return drawn(ax, factor=f"{rates[0] / rates[-1]:.0f}")


def leaving() -> Drawn:
    """Tensors that leave each of two nodes: in a flat ring, and what is due in two levels."""
    flat, _ = lab01.leaving_picture(cells.function(LAB, "ring_all_reduce"), due=1.5)
    due, _ = lab01.leaving_picture(parts.stub, args=[2], due=1.0)
    series = [("flat ring", flat), ("two levels: due", due)]
    ax = curves.bars(series, ["node 0", "node 1"], "leaving, in tensors", "2 nodes of 2 ranks")
    return drawn(ax, flat=f"{flat[0]:g}", due=f"{due[0]:g}")


def worth() -> Drawn:
    """1 GiB among two nodes of eight T4s on three network cards: flat ring and two levels."""
    cards, times = ("100 GbE", "25 GbE", "10 GbE"), []
    for nic in cards:
        pair = groups.on_cluster(hardware.cluster("8xT4", num_nodes=2, nic=nic))
        times.append([comm.group_time_s("all_reduce", 2**30, pair, a) * 1e3 for a in ("ring", "hierarchical")])
    series = [("flat ring", [each[0] for each in times]), ("two levels", [each[1] for each in times])]
    ax = curves.bars(series, cards, "time (ms)", "all_reduce of 1 GiB, 2 nodes of eight T4s, one card each")
    for label, time_ms in zip(ax.texts, [ms for _, row in series for ms in row], strict=True):
        label.set_text(f"{time_ms:,.0f}")
    return drawn(ax, factor=f"{times[-1][0] / times[-1][1]:.2g}")


def buckets() -> Drawn:
    """1 GiB of gradients in equal buckets, one all_reduce after another: how long, by bucket size."""
    lines, whole = [], 2**30
    for number, name in enumerate(("NVLink 4", "100 GbE")):
        group = groups.on_link(8, hardware.link(name))
        times = [whole / size * comm.group_time_s("all_reduce", size, group, "ring") for size in SIZES]
        lines.append(curves.Curve(name, SIZES, times, number=number))
    ax = curves.times(lines, "1 GiB on 8 ranks, one bucket after another", parts.wide(9))
    ax.set_xlabel("size of a bucket")
    slow = lines[1].values
    return drawn(ax, factor=f"{slow[0] / slow[-1]:,.0f}")


def _ones(world_size: int) -> list[tuple]:
    import torch

    return [(torch.ones(64),) for _ in range(world_size)]
