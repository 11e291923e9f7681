"""Figures of deck 00, Ranks: what ran on real ranks, and rounds and replays in virtual time.

Left out: pictures of solved exercises that would show how they are solved.
"""

from __future__ import annotations

from typing import Any

from labkit import launch, run_ranks
from labkit.cost import hardware
from labkit.labs import lab00
from labkit.record.prices import prices
from labkit.record.replay import replay
from labkit.view import curves, plot
from slides import cells
from slides.drawing import Drawn, drawn
from slides.figures import parts

LAB, ROWS, RANKS = "00", 10, 4
RANK_NAMES = [f"rank {rank}" for rank in range(RANKS)]


def one_line() -> Drawn:
    """Rows of four programs before and after one all_reduce."""
    before, after = zip(*launch(cells.function(LAB, "one_line"), RANKS, prints="quiet"), strict=True)
    return drawn(plot.grids(before, after, "four programs, one line: all_reduce"))


def counters() -> Drawn:
    """A counter that every rank raises, in its own memory."""
    notebook, add_one = cells.value(LAB, "counter"), cells.function(LAB, "add_one")
    add_one.__globals__["counter"] = notebook
    found = launch(add_one, RANKS, prints="quiet")
    ax = plot.grids([[notebook]] * RANKS, [[value] for value in found], "counter, on each rank")
    return drawn(ax, rank=found[0], notebook=add_one.__globals__["counter"])


def left_over() -> Drawn:
    """Blocks of equal size, which leave rows out."""
    size = ROWS // RANKS
    shards = [range(rank * size, (rank + 1) * size) for rank in range(RANKS)]
    left = [row for row in range(ROWS) if not any(row in shard for shard in shards)]
    ax = plot.shards(shards, ROWS, f"{size} rows each: rows {left[0]} and {left[1]} are on no rank")
    return drawn(ax, rows=ROWS, left=len(left))


def own_rows() -> Drawn:
    """Balanced blocks: what each rank averages."""
    shards = lab00.pictures.balanced(ROWS, RANKS)
    longest, shortest = max(map(len, shards)), min(map(len, shards))
    return drawn(plot.shards(shards, ROWS, f"{ROWS} rows on {RANKS} ranks"), longest=longest, shortest=shortest)


def weights() -> Drawn:
    """What a row counts in a mean of means, and in a sum over a count; in percent."""
    shards = lab00.pictures.balanced(ROWS, RANKS)
    naive = [100 / RANKS / len(shard) for shard in shards for _ in shard]
    series = [("mean of means", naive), ("sum over count", [100 / ROWS] * ROWS)]
    ax = curves.bars(series, [f"row {row}" for row in range(ROWS)], "weight of a row (%)", ax=parts.wide())
    for label, percent in zip(ax.texts, (*naive, *series[1][1]), strict=True):
        label.set_text(f"{round(percent, 1):g}")
    return drawn(ax, heavy=f"{max(naive):.3g}%", light=f"{min(naive):.2g}%", due=f"{100 / ROWS:g}%")


def late_receiver() -> Drawn:
    """A send whose recv comes late, recorded on two ranks and replayed on two T4s."""
    played = replay(parts.recorded(_late_receiver, 2), prices(hardware.cluster("T4", per_node=2)))
    held = parts.spans(played, {"compute": "computes", "wait": "in send"}, unit_s=1e-3)
    ax = plot.spans(held, "replayed on two T4s over PCIe 3")
    ax.set(xlabel="time (ms)", xlim=(0, None))
    return drawn(ax, num_bytes=4, wait_ms=f"{played.exposed_s(0) * 1e3:.1f} ms")


def _late_receiver() -> None:
    """Runs in a rank: rank 1 has something to compute before it receives."""
    import torch
    import torch.distributed as dist

    note = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.send(note, dst=1)
    else:
        torch.ones(1500, 1500) @ torch.ones(1500, 1500)
        dist.recv(note, src=0)


def star() -> Drawn:
    """A broadcast by one rank alone."""
    messages, title = lab00.broadcast_picture(cells.function(LAB, "star"), parts.stub, 8)
    return drawn(plot.messages(messages, 8, title), rounds=f"{max(end for _, end, *_ in messages):g}", ranks=8)


def knowing() -> Drawn:
    """How many know after each round: told by the root alone, or by all who know."""
    rounds = (1000 - 1).bit_length()
    names = [f"round\n{number}" for number in range(1, rounds + 1)]
    doubled = [min(1000, 2**number) for number in range(1, rounds + 1)]
    series = [("root alone tells", [number + 1 for number in range(1, rounds + 1)]), ("all who know tell", doubled)]
    ax = curves.bars(series, names, "ranks that know", ax=parts.wide())
    for label, count in zip(ax.texts, (*series[0][1], *doubled), strict=True):
        label.set_text(f"{count:,}")
    return drawn(ax, ranks="1,000", rounds=rounds, star=1000 - 1)


def chain() -> Drawn:
    """Each rank tells the next: as slow as a star."""
    messages, title = lab00.broadcast_picture(_chain, parts.stub, 8)
    taken = max(end for _, end, *_ in messages)
    ax = plot.messages(messages, 8, title.replace("_chain", "chain"))
    return drawn(ax, ranks=8, rounds=f"{taken:g}", least=(8 - 1).bit_length())


def _chain(tensor: Any, root: int) -> Any:
    """Runs in a rank: from the left, then to the right."""
    import torch.distributed as dist

    rank = dist.get_rank()
    if rank > root:
        dist.recv(tensor, src=rank - 1)
    if rank + 1 < dist.get_world_size():
        dist.send(tensor, dst=rank + 1)
    return tensor


def deadlock() -> Drawn:
    """Two ranks that send first: where each of them stands when nothing moves any more."""
    cause = run_ranks(cells.function(LAB, "swap"), 2, backend="gloo", prints="quiet").cause
    held = [(at.rank, 0.0, 1.0, "waiting", f"{at.doing}: waits for its recv") for at in cause.whereabouts]
    ax = plot.spans(held, "where launch found them")
    ax.set(xticks=[], xlabel="time, without end")
    return drawn(ax, said=parts.told(cause.sentence))


def ring() -> Drawn:
    """What a ring exchange leaves on five ranks."""
    before, after, _ = lab00.ring_picture(parts.stub, 5)
    return drawn(plot.grids(before, after, "what is due on 5 ranks"))


def from_one() -> Drawn:
    """broadcast and scatter, from rank 2."""
    before, broadcasted, scattered = zip(*_ran("from_one"), strict=True)
    pair = (before, broadcasted, "broadcast from rank 2"), (before, scattered, "scatter from rank 2")
    return drawn(parts.grids(*pair))


def to_one() -> Drawn:
    """gather and reduce, to rank 2."""
    before = [row for row, *_ in _ran("from_one")]
    gathered, reduced = zip(*_ran("to_one"), strict=True)
    first = [row[:1] for row in before]
    return drawn(parts.grids((first, gathered, "gather to rank 2"), (before, reduced, "reduce to rank 2")))


def pieces_of_a_sum() -> Drawn:
    """all_reduce beside reduce_scatter."""
    before = [row for row, *_ in _ran("from_one")]
    summed, piece, _, _ = zip(*_ran("everyone"), strict=True)
    ax = parts.grids((before, summed, "all_reduce"), (before, piece, "reduce_scatter"))
    return drawn(ax, terms=" + ".join(str(row[2]) for row in before), piece=piece[2][0])


def copies_and_swaps() -> Drawn:
    """all_gather beside all_to_all."""
    before = [row for row, *_ in _ran("from_one")]
    _, _, gathered, swapped = zip(*_ran("everyone"), strict=True)
    return drawn(parts.grids(([row[:1] for row in before], gathered, "all_gather"), (before, swapped, "all_to_all")))


def two_halves() -> Drawn:
    """reduce_scatter, then all_gather of its pieces."""
    before = [row for row, *_ in _ran("from_one")]
    pieces, gathered = zip(*launch(_two_halves, RANKS, prints="quiet"), strict=True)
    return drawn(parts.grids((before, pieces, "first: reduce_scatter"), (pieces, gathered, "then: all_gather")))


def _two_halves() -> tuple[list, list]:
    """Runs in a rank: what it holds after each half."""
    import torch
    import torch.distributed as dist

    row = torch.arange(RANKS) + 10 * dist.get_rank()
    piece = torch.zeros_like(row[:1])
    whole = [torch.zeros_like(piece) for _ in range(RANKS)]
    dist.reduce_scatter(piece, list(row.split(1)))
    dist.all_gather(whole, piece)
    return piece.tolist(), torch.cat(whole).tolist()


def barrier() -> Drawn:
    """Ranks with different work meet in a barrier, replayed on four T4s."""
    played = replay(parts.recorded(_barrier, RANKS), prices(hardware.cluster("T4", per_node=RANKS)))
    held = parts.spans(played, {"compute": "at work", "wait": "in barrier"}, unit_s=1e-3)
    ax = plot.spans(held, "replayed on four T4s over PCIe 3")
    ax.set_xlabel("time (ms)")
    return drawn(ax)


def _barrier() -> None:
    """Runs in a rank: the higher its number, the more it has to do."""
    import torch
    import torch.distributed as dist

    for _ in range(dist.get_rank() + 1):
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    dist.barrier()


def padding() -> Drawn:
    """Rows that each rank sends to the root with padding, and those it has."""
    rows, root = (1, 3, 0, 2), 1
    padded = [0 if rank == root else max(rows) for rank in range(RANKS)]
    needed = [0 if rank == root else count for rank, count in enumerate(rows)]
    series = [("padded to the longest", padded), ("rows that are there", needed)]
    ax = curves.bars(series, RANK_NAMES, "rows sent", f"to rank {root}, which has {rows[root]} of its own")
    return drawn(ax, padded=sum(padded), needed=sum(needed))


def in_one_order() -> Drawn:
    """weight and bias summed on two ranks in the same order."""
    before = [[1, 100]] * 2
    after = launch(_summed, 2, before[0], ("weight", "bias"), prints="quiet", backend="gloo")
    return drawn(plot.grids(before, after, "weight, bias: both ranks in one order"))


def _summed(values: list, order: tuple) -> list:
    """Runs in a rank: weight and bias after an all_reduce of each."""
    import torch
    import torch.distributed as dist

    held = {"weight": torch.tensor(values[0]), "bias": torch.tensor(values[1])}
    for name in order:
        dist.all_reduce(held[name])
    return [held["weight"].item(), held["bias"].item()]


def swapped() -> Drawn:
    """The same with the order swapped on rank 1: the notebook's cell."""
    outcome = run_ranks(cells.function(LAB, "sum_gradients"), 2, backend="gloo", prints="quiet")
    after = [[int(result["weight"]), int(result["bias"])] for result in outcome.results]
    ax = plot.grids([[1, 100]] * 2, after, "weight, bias: rank 1 in another order")
    return drawn(ax, weight=after[0][0], due=2, code=outcome.cause.code)


def skipped() -> Drawn:
    """Calls of four ranks, of which one has a batch less."""
    batches = [(4,), (4,), (3,), (4,)]
    outcome = run_ranks(cells.function(LAB, "train"), RANKS, rank_args=batches, prints="quiet")
    held = []
    for rank, ledger in enumerate(outcome.ledgers):
        for entry in ledger:
            kind = "communication" if entry.state == "done" else "waiting"
            held.append((rank, entry.sequence, entry.sequence + 1, kind, f"all_reduce #{entry.sequence}"))
    ax = plot.spans(held, "what each rank called")
    ax.set(xticks=[], xlabel="calls, in order")
    return drawn(ax, said=parts.told(outcome.cause.sentence))


def idle() -> Drawn:
    """Ranks that send or receive in each round, when all who know pass the whole tensor on."""
    know, busy = 1, []
    while know < 8:
        busy.append(2 * min(know, 8 - know))
        know += min(know, 8 - know)
    names = [f"round {number + 1}" for number in range(len(busy))]
    ax = curves.bars([("busy", busy), ("idle", [8 - count for count in busy])], names, "ranks of 8")
    return drawn(ax, share=f"{1 - sum(busy) / (8 * len(busy)):.0%}", ranks=8)


def _ran(name: str) -> list:
    """What a function of the notebook returns on four ranks."""
    return launch(cells.function(LAB, name), RANKS, prints="quiet")
