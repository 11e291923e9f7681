"""A training step with Adam on the device, the host or a disk, as stations that layers pass through one after another.

Backward makes the gradients of one layer after another; each goes down the PCIe link, is used by Adam on the host
(with a disk, state is read before and written after), and the new weights go up. A station takes one layer at a time.
The step is put together as the record of a rank for each station and played by `labkit.record.replay`: links are
messages, Adam is an op. Bytes per parameter in bf16 with fp32 state: ZeRO-Offload, arXiv:2101.06840, sections 3 and 4
(2 down, 2 up); ZeRO-Infinity, arXiv:2104.07857, section 3 (12 of optimizer state). Left out: a state that is read ahead
of its gradient, layers of different sizes, and the start-up time of each copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.record.events import RankRecord
    from labkit.record.timeline import Replay

STATES = ("device", "host", "disk")
WIRES = ("hbm", "pcie", "dram", "nvme")
DOWN, UP, STATE = 2, 2, 12  # bytes per parameter: gradient, weight, and master with two moments in fp32
# What Adam reads and writes: gradient 2, state 12; state 12, weight 2.
TOUCHED = DOWN + STATE + STATE + UP


def step_time_s(
    num_parameters: float,
    layers: int,
    forward_s: float,
    backward_s: float,
    bandwidth: Mapping[str, float],
    state: str,
    overlap: bool,
) -> float:
    """Seconds of a step. bandwidth: bytes per second by wire, "hbm", "pcie", "dram", "nvme", one direction.

    state: where Adam's state lies, "device", "host" or "disk". overlap: layers follow one another through the
    stations; without, each station begins when the one before has done all layers. ValueError for other values.
    The clocks of the stations, layer by layer: what `play` plays, and much faster.
    """
    pieces = _checked(num_parameters, layers, state, overlap)
    size = num_parameters / pieces
    if state == "device":
        return forward_s + backward_s + TOUCHED * num_parameters / bandwidth["hbm"]
    line = [num_bytes * size / bandwidth[wire] for _, wire, num_bytes in stations(state)]
    line.insert(len(line) // 2, TOUCHED * size / bandwidth["dram"])
    made_s, free_s = forward_s, [0.0] * len(line)
    for _ in range(pieces):
        ready_s = made_s = made_s + backward_s / pieces
        for number, seconds in enumerate(line):
            ready_s = free_s[number] = max(ready_s, free_s[number]) + seconds
    return ready_s


def play(
    num_parameters: float,
    layers: int,
    forward_s: float,
    backward_s: float,
    bandwidth: Mapping[str, float],
    state: str,
    overlap: bool,
) -> Replay:
    """The same step as a replay: rank 0 is the device, the others are the stations after it (see `stations`)."""
    from labkit.record.prices import Prices
    from labkit.record.replay import replay

    pieces = _checked(num_parameters, layers, state, overlap)
    size = num_parameters / pieces
    if state == "device":
        work = [forward_s, backward_s, TOUCHED * num_parameters / bandwidth["hbm"]]
        records = [_record(0, 1, [_op(seconds) for seconds in work])]
        links: list[float] = []
    else:
        wires = stations(state)
        links = [size * num_bytes / bandwidth[wire] for _, wire, num_bytes in wires]
        adam_s = TOUCHED * size / bandwidth["dram"]
        records = _chain(forward_s, backward_s / pieces, adam_s, len(wires) // 2, len(wires), pieces)
    prices = Prices(lambda rank, op: op.flops, lambda event: (0.0, 0.0), lambda source, _, __: (0.0, links[source]))
    return replay(records, prices)


def _checked(num_parameters: float, layers: int, state: str, overlap: bool) -> int:
    """In how many pieces the parameters pass through."""
    if state not in STATES:
        raise ValueError(f"state is {state!r}; it can be {', '.join(STATES)}")
    if type(layers) is not int or layers < 1 or not num_parameters > 0:
        raise ValueError(f"layers and num_parameters must be 1 or more, not {layers!r} and {num_parameters!r}")
    return layers if overlap else 1


def stations(state: str) -> list[tuple[str, str, int]]:
    """(name, wire, bytes per parameter) of the moves, in order. Adam comes after "down" or "read state"."""
    if state == "host":
        return [("down", "pcie", DOWN), ("up", "pcie", UP)]
    reads, writes = ("read state", "nvme", STATE), ("write state", "nvme", STATE)
    return [("down", "pcie", DOWN), reads, writes, ("up", "pcie", UP)]


def _chain(forward_s: float, backward_s: float, adam_s: float, adam: int, moves: int, pieces: int) -> list[RankRecord]:
    """Records of the device and of what follows: move i goes from rank i to i+1, Adam is the op of rank `adam`."""
    records = []
    for rank in range(moves + 1):
        events = [_op(forward_s)] if rank == 0 else [_message("recv", rank - 1, rank) for _ in range(pieces)]
        sends = []
        for piece in range(pieces):
            if rank:
                events.append(_wait(piece))
            if rank in (0, adam):
                events.append(_op(backward_s if rank == 0 else adam_s))
            if rank < moves:
                sends.append(len(events))
                events.append(_message("send", rank + 1, rank))
        records.append(_record(rank, moves + 1, events + [_wait(of) for of in sends]))
    return records


def _op(seconds: float):
    """Its FLOPs are its seconds."""
    from labkit.record.events import Op

    return Op(0, "aten.mm", seconds, 0, 0, (), (), False, 0, 0.0, 0.0, "")


def _wait(of: int):
    from labkit.record.events import Wait

    return Wait(0, of, "call", False, 0.0, 0.0, "")


def _message(op: str, peer: int, rank: int):
    from labkit.record.events import PointToPoint

    pair = tuple(sorted((rank, peer)))
    return PointToPoint(0, op, op, "0", pair, peer, 0, 0, 1, "uint8", (), (), False, True, 0, 0.0, 0.0, "")


def _record(rank: int, world_size: int, events: list) -> RankRecord:
    from dataclasses import replace

    from labkit.record.events import RankRecord

    numbered = tuple(replace(event, index=index) for index, event in enumerate(events))
    return RankRecord(rank, world_size, numbered, (), (), 0, 0, 0, (), 0.0, 0.0)
