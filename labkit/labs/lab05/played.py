"""A training step on the played device: what it holds over the step, and its copies replayed on a named GPU's link.

The step is that of one small Llama in bf16 with the optimizer that is handed in. Replayed, the device's ops take what
its roofline gives, each gradient copied down is a message on the PCIe link, Adam on the host is an op bound by DRAM,
and each weight copied up a message again; these run beside one another, each in the order of the record. Left out: what
the learner's Python needs, and that Python which waits in a copy queues no further op (`pinned` copies and a thread).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import labkit.labs.lab05.stations as stations

if TYPE_CHECKING:
    from labkit.cost.parts import Device
    from labkit.record.device import Entry
    from labkit.record.timeline import Replay

SHAPE = {"hidden": 192, "layers": 4, "heads": 6, "kv_heads": 2, "ffn": 512}
BATCH, LENGTH = 2, 64


@dataclass(frozen=True)
class Played:
    """entries: of the last step. losses: of every step. parameter_bytes: of the weights, in bf16."""

    entries: tuple[Entry, ...]
    losses: tuple[float, ...]
    parameter_bytes: int

    @property
    def held(self) -> list[int]:
        """Bytes on the device after each entry."""
        return [entry.held_bytes for entry in self.entries]

    def moved(self, kind: str) -> int:
        """Bytes that went "down" or "up" from the begin of backward on."""
        return sum(entry.num_bytes for entry in self.entries[self._backward :] if entry.kind == kind)

    @property
    def _backward(self) -> int:
        return next(i for i, entry in enumerate(self.entries) if entry.name == "backward")


def train(make: Callable[[Any], Any], steps: int = 2) -> Played:
    """Train the small Llama by `make(parameters)`, an optimizer with step() and zero_grad(), on the played device."""
    import torch

    from labkit.model.llama import Llama, Shape, loss_of
    from labkit.model.text import batches
    from labkit.record.device import Book, module_to_device, on_device, to_device, to_host

    torch.manual_seed(0)
    book = Book()
    model = module_to_device(Llama(Shape(**SHAPE)).bfloat16(), book)
    num_bytes, losses, first = book.held_bytes, [], 0
    with on_device(book):
        optimizer = make(model.parameters())
        for tokens, targets in batches(BATCH, LENGTH, steps=steps):
            first = len(book.entries)
            loss = loss_of(model(to_device(tokens, book)), to_device(targets, book))
            losses.append(float(to_host(loss.detach())))
            book.mark("backward")
            loss.backward()
            del loss
            book.mark("step")
            optimizer.step()
            optimizer.zero_grad()
            book.mark("end")
    return Played(tuple(book.entries[first:]), tuple(losses), num_bytes)


def replayed(played: Played, device: Device, dram: float) -> Replay:
    """The step on a GPU with its own link to the host. dram: bytes per second of the host's memory.

    Ranks: 0 the GPU, 1 the host, 2 the GPU's other copy engine, where weights arrive.
    """
    from labkit.record.prices import Prices
    from labkit.record.replay import replay

    link, precision = device.host, "bf16" if any(name == "bf16" for name, _ in device.peaks) else "fp16"

    def op(rank: int, event: Any) -> float:
        if rank:
            return event.read_bytes / dram
        return device.time_s(event.flops, event.read_bytes, precision)

    def message(source: int, destination: int, num_bytes: int) -> tuple[float, float]:
        return link.alpha_s, num_bytes / link.bandwidth

    return replay(_records(played), Prices(op, lambda event: (0.0, 0.0), message))


def _records(played: Played) -> list[Any]:
    """The book as records of three ranks. A gradient that comes down is followed by Adam on its elements, and those
    weights that go up after it are sent then."""
    gpu, host, back = [], [], []
    started = False
    for entry in played.entries:
        started = started or entry.name == "backward"
        if entry.kind == "op":
            gpu.append(replace(stations._op(entry.flops), read_bytes=entry.num_bytes, name=entry.name))
        elif entry.kind == "down" and started:
            gpu.append(replace(stations._message("send", 1, 0), num_bytes=entry.num_bytes))
            host.append(("recv", entry.num_bytes))
        elif entry.kind == "up" and started and host:
            host.append(("send", entry.num_bytes))
            back.append(replace(stations._message("recv", 1, 2), num_bytes=entry.num_bytes))
        elif entry.name == "backward":
            gpu.append(replace(stations._op(0.0), name="backward"))
    gpu += [stations._wait(i) for i, event in enumerate(gpu) if hasattr(event, "peer")]
    back += [stations._wait(i) for i in range(len(back))]
    streams = gpu, _host(host), back
    return [stations._record(rank, len(streams), events) for rank, events in enumerate(streams)]


def _host(moves: Sequence[tuple[str, int]]) -> list[Any]:
    """Receives are posted first, so that the link need not wait for the host."""
    received = [num_bytes for kind, num_bytes in moves if kind == "recv"]
    events = [replace(stations._message("recv", 0, 1), num_bytes=num_bytes) for num_bytes in received]
    number, sends = 0, []
    for kind, num_bytes in moves:
        if kind == "recv":
            events.append(stations._wait(number))
            touched = stations.TOUCHED * num_bytes // stations.DOWN
            events.append(replace(stations._op(0.0), read_bytes=touched, name="adam"))
            number += 1
        else:
            sends.append(len(events))
            events.append(replace(stations._message("send", 2, 1), num_bytes=num_bytes))
    return events + [stations._wait(of) for of in sends]


Lanes = list[tuple[str, list[tuple[float, float, str]]]]


def lanes(played: Played, played_on: Replay) -> Lanes:
    """A replay as lanes: the GPU, the link down, Adam on the host, the link up; (start_s, end_s, kind) each."""
    found: dict[str, list] = {"GPU": [], "PCIe, down": [], "host: Adam": [], "PCIe, up": []}
    ops = [entry for entry in played.entries if entry.kind == "op"]
    before = sum(entry.kind == "op" for entry in played.entries[: played._backward])
    gpu_events = _order(played)
    for span in played_on.spans:
        if span.kind == "compute" and span.rank == 0:
            number = gpu_events[span.event]
            in_step = number >= len(ops) - sum(e.kind == "op" for e in played.entries[_mark(played, "step") :])
            kind = "forward" if number < before else "optimizer" if in_step else "backward"
            found["GPU"].append((span.start_s, span.end_s, kind))
        elif span.kind == "compute":
            found["host: Adam"].append((span.start_s, span.end_s, "optimizer"))
        elif span.kind == "communication" and (span.rank, span.label) in ((0, "send"), (2, "recv")):
            lane = "PCIe, down" if span.rank == 0 else "PCIe, up"
            found[lane].append((span.start_s, span.end_s, "communication"))
    return [(name, spans) for name, spans in found.items() if spans]


def _mark(played: Played, name: str) -> int:
    return next(i for i, entry in enumerate(played.entries) if entry.kind == "mark" and entry.name == name)


def _order(played: Played) -> dict[int, int]:
    """Event of the GPU's record -> its number among ops."""
    found, number, started = {}, 0, False
    index = 0
    for entry in played.entries:
        started = started or entry.name == "backward"
        if entry.kind == "op":
            found[index] = number
            number += 1
            index += 1
        elif entry.name == "backward" or (entry.kind == "down" and started):
            index += 1
    return found
