"""One training step of ZeRO, anyone's, as it was recorded on every rank: bytes held by kind, bytes sent, losses.

The step is that of one named model, `model`, from forward to the cleared gradients, after others that made the
optimizer's state. A way is a function from the model to (forward, what is done after backward); `ways` has DDP's,
FSDP2's and that of any class with the face of 4.1 to 4.3. Left out: DeepSpeed (`engines`), drawing (`labkit.view`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from labkit.record.events import RankRecord
    from labkit.record.held import Held

BATCH, LENGTH = 1, 64  # windows of the text per rank, and their bytes
LEARNING_RATE = 1e-3
# What a picture shows, from the record's kinds.
SHOWN = {
    "parameters": ("parameter",),
    "gradients": ("gradient",),
    "optimizer": ("optimizer",),
    "buffers": ("communication", "buffer"),
    "activations": ("activation", "temporary"),
}

Way = Callable[[Any], tuple[Callable, Callable, Any]]  # (forward, finish, optimizer) of a model


@dataclass(frozen=True)
class Step:
    """A recorded step on ranks 0 ... n-1. losses: of every step so far, the mean over ranks. parameters: of the model.

    name: whose it is. backward_s: when rank 0's backward ended, from its record's begin.
    moved: {op: (calls, bytes of the full tensors)} of rank 0.
    """

    name: str
    records: tuple[RankRecord, ...]
    losses: tuple[float, ...]
    parameters: int
    backward_s: float

    @property
    def moved(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for event in self.records[0].collectives:
            calls, num_bytes = found.get(event.op, (0, 0))
            found[event.op] = calls + 1, num_bytes + event.num_bytes
        return found

    @property
    def sent_elements(self) -> float:
        """Elements that rank 0 sent, per parameter of the model; every element as wide as it was sent."""
        return sum(e.sent_bytes / e.element_bytes for e in self.records[0].collectives) / self.parameters

    def held(self, moment: str = "peak") -> dict[str, int]:
        """Bytes on rank 0 by what a picture shows, at the total's peak, when backward ended ("backward"), or at the
        step's "begin" or "end".
        """
        all_held = self.bytes_held()
        by_kind = all_held.at(self.backward_s) if moment == "backward" else getattr(all_held, moment)
        return {shown: sum(by_kind[kind] for kind in kinds) for shown, kinds in SHOWN.items()}

    def states(self) -> dict[str, int]:
        """Bytes of model states on rank 0 when backward has ended: parameters, gradients, optimizer."""
        found = self.held("backward")
        return {shown: found[shown] for shown in ("parameters", "gradients", "optimizer")}

    def most(self, shown: str) -> int:
        """The most bytes of a kind that rank 0 holds at any moment."""
        lines = [self.bytes_held().by_kind[kind] for kind in SHOWN[shown]]
        return max(map(sum, zip(*lines, strict=True)))

    def bytes_held(self) -> Held:
        """Bytes on rank 0 over the step."""
        from labkit.record.held import held

        return held(self.records[0])


def model() -> nn.Module:
    """The named model of lab 04, a Llama of 3.0 million parameters in float32, from seed 0."""
    import torch

    from labkit.model.llama import Llama, Shape

    torch.manual_seed(0)
    return Llama(Shape(hidden=256, layers=4, heads=8, kv_heads=4, ffn=688))


def way_of(made: Any) -> Way:
    """The way of a class with the face of 4.1 to 4.3; what is a way already stays as it is."""
    import torch

    if not isinstance(made, type):
        return made
    return module_way(made) if issubclass(made, torch.nn.Module) else optimizer_way(made)


def record(name: str, made: Any, world_size: int = 4, steps: int = 3, microbatches: int = 1) -> Step:
    """Train the model on ranks of one thread each, by a way or such a class, and record the last step.

    microbatches: backwards of one step, each on rows of its own. Raises RankFailed as `launch`.
    """
    from labkit.ranks.launch import launch

    preload = ("labkit.record.trace", "labkit.record.held")
    found = launch(in_rank, world_size, way_of(made), steps, microbatches, prints="quiet", preload=preload)
    return step_of(name, found)


def step_of(name: str, found: Sequence[tuple]) -> Step:
    """The Step of what ranks gave back: (record, losses, number of parameters, when backward ended) each."""
    records, losses, counts, ended = zip(*found, strict=True)
    means = tuple(sum(of_ranks) / len(found) for of_ranks in zip(*losses, strict=True))
    return Step(name, tuple(records), means, counts[0], ended[0] - records[0].began_s)


def in_rank(way: Way, steps: int, microbatches: int) -> tuple[RankRecord, list[float], int, float]:
    """Runs in a rank: (record of the last step, losses, parameters of the model, when backward ended in it)."""
    import time

    import torch.distributed as dist

    from labkit.model.llama import loss_of
    from labkit.model.text import batches
    from labkit.ranks.rank import device
    from labkit.record.trace import Trace

    plain = model().to(device())
    count = sum(parameter.numel() for parameter in plain.parameters())
    forward, finish, optimizer = way(plain)
    losses, ended = [], [0.0]
    rows = batches(microbatches * BATCH, LENGTH, 0, dist.get_rank(), dist.get_world_size(), steps=steps)

    def step(tokens: Any, targets: Any) -> Any:
        total = 0.0
        pieces = (each.to(device()).chunk(microbatches) for each in (tokens, targets))
        for some, due in zip(*pieces, strict=True):
            loss = loss_of(forward(some), due) / microbatches
            loss.backward()
            total = total + loss.detach()
        ended[0] = time.monotonic()
        finish()
        return total

    for number, (tokens, targets) in enumerate(rows):
        if number < steps - 1:
            losses.append(step(tokens, targets).item())
            continue
        with Trace(optimizers=[optimizer]) as trace:
            loss = step(tokens, targets)
        losses.append(loss.item())
    return trace.record, losses, count, ended[0]


def serial_losses(world_size: int, steps: int = 3) -> tuple[float, ...]:
    """Losses of plain torch.optim.AdamW on one device, on the rows of all ranks."""
    import torch

    from labkit.labs.lab02.models import one_thread
    from labkit.model.llama import loss_of
    from labkit.model.text import batches

    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    losses = []
    with one_thread():
        for tokens, targets in batches(BATCH * world_size, LENGTH, steps=steps):
            loss = loss_of(plain(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return tuple(losses)


@contextmanager
def untold() -> Iterator[None]:
    """Meanwhile nothing is gathered or broadcast by torch.distributed on this rank: calls return, and do nothing."""
    import torch.distributed as dist

    names = [name for name in dir(dist) if name.startswith("all_gather") or name == "broadcast"]
    kept = {name: getattr(dist, name) for name in names if callable(getattr(dist, name))}
    done = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)
    for name in kept:
        setattr(dist, name, lambda *_, **__: done)
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(dist, name, original)


# Ways


def optimizer_way(cls: Callable) -> Way:
    """The way of a class with the face of 4.1 or 4.2: it takes parameters, and has step() and zero_grad()."""

    def way(plain: Any) -> tuple:
        made = cls(plain.parameters(), lr=LEARNING_RATE)

        def finish() -> None:
            made.step()
            made.zero_grad()

        return plain, finish, made

    return way


def module_way(cls: Callable) -> Way:
    """The way of a class with the face of 4.3: it takes the module, and is called in its place."""

    def way(plain: Any) -> tuple:
        made = cls(plain, lr=LEARNING_RATE)

        def finish() -> None:
            made.step()
            made.zero_grad()

        return made, finish, made

    return way


def ddp_way(plain: Any) -> tuple:
    """torch's DistributedDataParallel, each rank with the whole AdamW; its gradients are views of its buckets."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    return wrapped, *adamw(plain)


def fsdp_way(plain: Any) -> tuple:
    """torch's FSDP2 (fully_shard), a unit per layer and one for the rest: ZeRO-3, but for what its root keeps."""
    from torch.distributed.fsdp import fully_shard

    for layer in plain.layers:
        fully_shard(layer)
    fully_shard(plain)
    return plain, *adamw(plain)


def adamw(plain: Any) -> tuple[Callable[[], None], Any]:
    """(what is done after backward, optimizer): torch's AdamW over a model's parameters as they are now."""
    import torch

    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return finish, optimizer
