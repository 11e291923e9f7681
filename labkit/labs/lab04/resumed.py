"""Training that goes on from a sharded checkpoint, on any number of ranks: what stands between 4.1 and 4.5.

A rank's state is that of a class with the face of 4.1 that keeps its part in `shard` and torch's AdamW over it in
`inner`, in whichever order it cuts (`Own`); of another, `Sliced` takes the place, a replica that gives out its part
only when asked. All run in a rank but `by_one`. Left out: where checkpoints lie and when they count (4.5).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

MOMENTS = ("exp_avg", "exp_avg_sq")
ROWS, LENGTH = 12, 64  # of a step, for all ranks together: 2, 3 and 4 divide 12
LEARNING_RATE = 1e-3


class Sliced:
    """A whole AdamW over one flat tensor on every rank."""

    def __init__(self, parameters: Any, lr: float = LEARNING_RATE):
        import torch

        self.parameters = list(parameters)
        self.whole = torch.nn.utils.parameters_to_vector(self.parameters).detach().clone()
        self.inner = torch.optim.AdamW([self.whole], lr=lr)
        self.target = self.whole

    def part_of(self, whole: Any) -> Any:
        """All of it, as it is."""
        return whole.clone()

    def whole_of(self, kept: Any) -> Any:
        """All of it, as it is."""
        return kept

    def step(self) -> None:
        """Averages gradients over ranks, and steps everything."""
        import torch
        import torch.distributed as dist

        self.whole.grad = torch.cat([p.grad.flatten() for p in self.parameters])
        dist.all_reduce(self.whole.grad)
        self.whole.grad /= dist.get_world_size()
        self.inner.step()
        torch.nn.utils.vector_to_parameters(self.whole, self.parameters)

    def zero_grad(self) -> None:
        """Drops gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class Own:
    """An optimizer with the face of 4.1, and where the elements of its shard stand in the flat parameters."""

    def __init__(self, optimizer: Any, places: Any):
        self.optimizer, self.inner, self.target = optimizer, optimizer.inner, _target(optimizer)
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad
        self.places = places

    def part_of(self, whole: Any) -> Any:
        """This rank's part, in the optimizer's own order, of a flat tensor in that of `parameters()`."""
        import torch

        return torch.cat([whole.new_zeros(1), whole])[self.places]

    def whole_of(self, kept: Any) -> Any:
        """The flat tensor in the order of `parameters()`, without padding, of the parts that ranks keep."""
        places, parts = _gathered(self.places), _gathered(kept)
        whole = parts.new_zeros(int(places.max()) + 1)
        whole[places] = parts
        return whole[1:]


def begin(cls: Callable, checkpoint: Any, model: Any) -> tuple[int, Any]:
    """(steps done, optimizer) of a model, from the newest checkpoint, or from the start where there is none."""
    import torch

    size = sum(parameter.numel() for parameter in model.parameters())
    try:
        done, shards = checkpoint.load()
    except FileNotFoundError:
        done, shards = 0, {}
    if shards:
        torch.nn.utils.vector_to_parameters(_gathered(shards["parameters"])[:size], model.parameters())
    own = _places(cls, model)
    optimizer = Sliced(model.parameters()) if own is None else Own(cls(model.parameters(), lr=LEARNING_RATE), own)
    if shards:
        moments = {name: optimizer.part_of(_gathered(shards[name])[:size]) for name in MOMENTS}
        optimizer.inner.state[optimizer.target] = {"step": torch.tensor(float(done)), **moments}
    return done, optimizer


def state_of(optimizer: Own | Sliced) -> dict[str, Any]:
    """This rank's part of the flat, padded parameters and of both moments, in the order of `parameters()`."""
    import torch.distributed as dist

    from labkit.labs.lab04.checkpoint_cases import part_of

    kept = {"parameters": optimizer.target, **optimizer.inner.state[optimizer.target]}
    every = {name: optimizer.whole_of(kept[name].detach()) for name in ("parameters", *MOMENTS)}
    return {name: part_of(each, dist.get_rank(), dist.get_world_size()) for name, each in every.items()}


def _target(optimizer: Any) -> Any:
    """The one tensor that `inner` steps, which may be another object than `shard`; None where that is not so."""
    import torch

    shard, inner = getattr(optimizer, "shard", None), getattr(optimizer, "inner", None)
    if not (isinstance(shard, torch.Tensor) and isinstance(inner, torch.optim.AdamW)):
        return None
    stepped = [each for group in inner.param_groups for each in group["params"]]
    return stepped[0] if len(stepped) == 1 and stepped[0].shape == shard.shape and shard.dim() == 1 else None


def _places(cls: Callable, model: Any) -> Any:
    """Where each element of this rank's shard stands in the flat parameters, from 1 on, 0 for padding.

    Read off a shard that is cut from a model whose parameters are 1, 2, 3 ... None where ranks' shards differ in length
    or do not have every element once.
    """
    import torch
    import torch.distributed as dist

    counting = copy.deepcopy(model)
    size = sum(parameter.numel() for parameter in counting.parameters())
    device = next(counting.parameters()).device
    numbers = torch.arange(1, size + 1, dtype=torch.float32, device=device)
    torch.nn.utils.vector_to_parameters(numbers.clone(), counting.parameters())
    found = _target(cls(counting.parameters(), lr=LEARNING_RATE))
    lengths: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, -1 if found is None else found.numel())
    if found is None or len(set(lengths)) > 1:
        return None
    places = found.detach().long()
    every = _gathered(places)
    return places if torch.equal(every[every > 0].sort().values, numbers.long()) else None


def model() -> Any:
    """The Llama of 0.4 million parameters that is saved and resumed, from seed 0, on this rank's device."""
    import torch

    from labkit.model.llama import Llama, Shape
    from labkit.ranks.rank import device

    torch.manual_seed(0)
    return Llama(Shape()).to(device())


def die_in_mid_write(num_bytes: int) -> None:
    """From now on the kernel ends this rank, as by a kill, when a file of its becomes larger than so many bytes."""
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def by_one(steps: int) -> list[float]:
    """The losses of plain torch.optim.AdamW that is never interrupted, one device, all rows."""
    import torch

    from labkit.labs.lab02.models import one_thread
    from labkit.model.llama import loss_of
    from labkit.model.text import batches

    plain = model().cpu()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    losses = []
    with one_thread():
        for tokens, targets in batches(ROWS, LENGTH, steps=steps):
            loss = loss_of(plain(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def _gathered(part: Any) -> Any:
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)
