"""What stands in for exercises of lab 04 that are still stubs: torch's own, which sends what a right answer sends.

Left out: solutions. `torchs_clip` sends every shard, which is what 4.4 is against.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.labs.lab04.recorded import LEARNING_RATE, adamw


class TorchZero:
    """The face of 4.1: torch's ZeroRedundancyOptimizer, which gives every parameter whole to one owner.

    A gradient is reduced to its owner alone, the parameter broadcast by it: 2Ψ (N-1)/N elements in a step, as due.
    """

    def __init__(self, parameters: Any, lr: float = LEARNING_RATE, **options: Any):
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.inner = ZeroRedundancyOptimizer(self.parameters, torch.optim.AdamW, lr=lr, **options)

    def step(self) -> None:
        """Averages each gradient at its owner, then steps."""
        import torch.distributed as dist

        owner = self.inner._param_to_rank  # no public name says who owns what
        for parameter in self.parameters:
            if parameter.grad is not None:
                dist.reduce(parameter.grad, owner[parameter])
                parameter.grad /= dist.get_world_size()
        self.inner.step()

    def zero_grad(self) -> None:
        """Drops gradients."""
        self.inner.zero_grad()


def kept_way(plain: Any) -> tuple:
    """In place of 4.2: FSDP2 whose parameters stay whole until the step, beside this rank's part of them.

    With k backwards it sends (k+1)Ψ (N-1)/N elements in a step, as 4.2 does, and keeps 4Ψ/N bytes more.
    """
    return _fully_sharded(plain, whole=True)


def freed_way(plain: Any) -> tuple:
    """In place of 4.3: FSDP2 that frees its root too after forward, as 4.3 does: 3Ψ (N-1)/N elements in a step."""
    return _fully_sharded(plain, whole=False)


def _fully_sharded(plain: Any, whole: bool) -> tuple:
    """A way of FSDP2. whole: parameters are gathered once a step, by its first forward."""
    from torch.distributed.fsdp import fully_shard

    units = [*plain.layers, plain]
    for unit in units:
        fully_shard(unit, reshard_after_forward=not whole)
    plain.set_reshard_after_backward(not whole)
    step, optimizer = adamw(plain)

    def finish() -> None:
        step()
        for unit in units:
            unit.reshard()  # what is whole is from before the step

    return plain, finish, optimizer


def torchs_clip(shards: list, max_norm: float) -> float:
    """In place of 4.4: every rank gathers all shards, and torch's clip_grad_norm_ works on the whole."""
    import torch
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, shards)
    rows = [[torch.nn.Parameter(torch.zeros_like(shard)) for shard in mine] for mine in everyone]
    for row, mine in zip(rows, everyone, strict=True):
        for parameter, shard in zip(row, mine, strict=True):
            parameter.grad = shard.clone()
    norm = torch.nn.utils.clip_grad_norm_(sum(rows, []), max_norm)
    for shard, parameter in zip(shards, rows[dist.get_rank()], strict=True):
        shard.copy_(parameter.grad)
    return norm.item()


class TorchCheckpoint:
    """The face of 4.5: torch.distributed.checkpoint, which writes every rank's part and cuts anew when loading."""

    def __init__(self, folder: Any):
        self.folder = Path(folder)

    def save(self, step: int, shards: dict[str, Any], sizes: dict[str, int]) -> None:
        """Writes step and parts below the folder; its `.metadata`, written last, makes them a checkpoint."""
        import torch.distributed.checkpoint as dcp

        dcp.save({name: _dtensor(part, sizes[name]) for name, part in shards.items()}, checkpoint_id=self._at(step))

    def load(self) -> tuple[int, dict[str, Any]]:
        """(step, this rank's parts) of the newest. Raises FileNotFoundError."""
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        steps = [int(each.parent.name[5:]) for each in self.folder.glob("step-*/.metadata")]
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.folder}")
        told = dcp.FileSystemReader(self._at(max(steps))).read_metadata().state_dict_metadata
        found, n = {}, dist.get_world_size()
        for name, each in told.items():
            part = torch.zeros(-(-each.size[0] // n), dtype=each.properties.dtype)
            found[name] = part, _dtensor(part, each.size[0])
        dcp.load({name: cut for name, (_, cut) in found.items()}, checkpoint_id=self._at(max(steps)))
        for part, cut in found.values():
            local = cut.to_local()
            part[: local.numel()] = local
        return max(steps), {name: part for name, (part, _) in found.items()}

    def _at(self, step: int) -> str:
        return str(self.folder / f"step-{step}")


def _dtensor(part: Any, size: int) -> Any:
    """A rank's padded part as one of a DTensor that is cut along its first dim, without the padding."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    n, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(part.device.type, (n,))
    mine = part[: max(0, min(part.numel(), size - rank * part.numel()))]
    return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=(size,), stride=(1,))
