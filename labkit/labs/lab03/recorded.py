"""One training step of labkit's Llama, recorded on a rank: what is held when, of which kind, and whose it is.

The step before it is not recorded, so that the optimizer has its state. Left out: several ranks, which labs 02 and 04
have, and a GPU's allocator (`labkit.record.allocator`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import labkit.labs.lab02.asked as asked

OPTIMIZERS = ("sgd", "momentum", "adamw")
SHAPE = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 344}


@dataclass(frozen=True)
class Step:
    """A recorded step. record: RankRecord. flops: of its matrices. forward_bytes: held at the end of forward, by kind.

    parameters: how many there are. sizes: of the model, as SHAPE has them.
    """

    record: Any
    forward_bytes: dict[str, int]
    parameters: int
    batch: int
    length: int
    checkpoint: str
    sizes: dict[str, int]

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each kind at its most, as formulas count them: activations with all that backward adds to them."""
        held = self.held
        return {
            "parameters": held.begin["parameter"],
            "gradients": max(held.by_kind["gradient"]),
            "optimizer": held.begin["optimizer"],
            "activations": held.peak["activation"] + held.peak["temporary"],
            "buffers": held.peak["buffer"] + held.peak["communication"],
        }

    @property
    def flops(self) -> int:
        return self.record.flops

    @property
    def held(self) -> Any:
        """Bytes held by kind, over the step."""
        from labkit.record.held import held

        return held(self.record)

    @property
    def owners(self) -> Any:
        """Who holds bytes at the peak, the largest first."""
        from labkit.record.held import at_peak

        return at_peak(self.record)


def record_step(batch: int, length: int, optimizer: str = "adamw", checkpoint: str = "none", **shape: int) -> Step:
    """Train two steps on one rank, the second one recorded, from forward to zero_grad.

    checkpoint: "none", "all" layers, or "last". shape: sizes other than SHAPE's. ValueError for what cannot be.
    """
    from labkit.ranks.launch import launch

    asked.whole("batch", batch, 4)
    asked.whole("length", length, 128)
    for name, value, known in (
        ("optimizer", optimizer, OPTIMIZERS),
        ("checkpoint", checkpoint, ("none", "all", "last")),
    ):
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")
    sizes = {**SHAPE, **shape}
    record, marks, count = launch(_train, 1, batch, length, optimizer, checkpoint, sizes, prints="quiet")[0]
    return Step(record, _at(record, marks), count, batch, length, checkpoint, sizes)


def _train(batch: int, length: int, optimizer: str, checkpoint: str, sizes: dict) -> tuple:
    """Runs in a rank: (record, seconds from its begin to the end of forward, number of parameters)."""
    import time

    import torch

    from labkit.model.llama import Llama, Shape, loss_of
    from labkit.model.text import batches
    from labkit.record.trace import Trace

    torch.manual_seed(0)
    model = Llama(Shape(**sizes))
    made = optimizer_of(optimizer, model)
    wrap(model, checkpoint)
    first, second = batches(batch, length, steps=2)
    loss_of(model(first[0]), first[1]).backward()
    made.step()
    made.zero_grad()
    with Trace() as trace:
        loss = loss_of(model(second[0]), second[1])
        forward_s = time.perf_counter()
        loss.backward()
        made.step()
        made.zero_grad()
    return trace.record, forward_s - trace.record.began_s, sum(p.numel() for p in model.parameters())


def step(batch: int = 4, length: int = 128, optimizer: str = "adamw", checkpoint: str = "none") -> None:
    """Record a step and print the bytes held, by kind, before it, at the end of forward, and at the peak.

    Raises as `record_step`.
    """
    found = record_step(batch, length, optimizer, checkpoint)
    held = found.held
    moments = (("before", held.begin), ("after forward", found.forward_bytes), ("at the peak", held.peak))
    print(f"{found.parameters:,} parameters, {batch} x {length} tokens, {optimizer}, checkpoint {checkpoint}; bytes")
    print(f"{'':14}" + "".join(f"{name:>15}" for name, _ in moments))
    for kind in held.by_kind:
        print(f"{kind:14}" + "".join(f"{at[kind]:15,}" for _, at in moments))
    print(f"{'together':14}" + "".join(f"{sum(at.values()):15,}" for _, at in moments))


def time_steps(ways: tuple[str, ...], steps: int = 7, batch: int = 4, length: int = 128) -> list[float]:
    """Median seconds of a step by the clock, not recorded, for each way to checkpoint, by turns."""
    from labkit.ranks.launch import launch

    return launch(_timed, 1, ways, steps, batch, length, prints="quiet", deadline_s=120.0)[0]


def _timed(ways: tuple[str, ...], steps: int, batch: int, length: int) -> list[float]:
    """Runs in a rank."""
    import time
    from statistics import median

    import torch

    from labkit.model.llama import Llama, Shape, loss_of
    from labkit.model.text import batches

    torch.manual_seed(0)
    models = [Llama(Shape(**SHAPE)) for _ in ways]
    for model, way in zip(models, ways, strict=True):
        wrap(model, way)
    took: list[list[float]] = [[] for _ in ways]
    for tokens, targets in batches(batch, length, steps=steps + 1):
        for model, times in zip(models, took, strict=True):
            began = time.perf_counter()
            loss_of(model(tokens), targets).backward()
            times.append(time.perf_counter() - began)
            model.zero_grad()
    return [median(times[1:]) for times in took]


def optimizer_of(name: str, model: Any) -> Any:
    """torch's optimizer of that name over a model's parameters."""
    import torch

    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9 if name == "momentum" else 0.0, foreach=False)


def wrap(model: Any, checkpoint: str) -> None:
    """All layers, or the last one, run under torch's checkpoint from now on."""
    import functools

    from torch.utils.checkpoint import checkpoint as torchs

    chosen = {"none": [], "all": list(model.layers), "last": [model.layers[-1]]}[checkpoint]
    for layer in chosen:
        layer.forward = functools.partial(torchs, layer.forward, use_reentrant=False)


def _at(record: Any, forward_s: float) -> dict[str, int]:
    from labkit.record.held import held

    return held(record).at(forward_s)
