"""More wrong answers to exercise 4.5, `ShardedCheckpoint`: of steps saved again, of what is removed too early, of ranks
that do not wait; and torch's own. The others stand in `lab04_checkpoint`.
"""

import json
import os
import shutil
import time
from pathlib import Path

import lab04_checkpoint_right as others
import torch
import torch.distributed as dist
from lab04_checkpoint_right import Renamed, cut


class RemovesOlderOnesFirst(Renamed):
    """Only the newest is kept, and the others go before it stands."""

    def commit(self, new, final):
        for each in self.steps().values():
            shutil.rmtree(each)
        super().commit(new, final)


class RemovesTheSameStepFirst(Renamed):
    """A step that is saved again is removed before any part of the new save is there."""

    def begin(self, new):
        if dist.get_rank() == 0:
            shutil.rmtree(new.with_suffix(""), ignore_errors=True)
        super().begin(new)


class NoNameForAMoment(Renamed):
    """Removed, then renamed: between the two there is nothing of that step."""

    def commit(self, new, final):
        shutil.rmtree(final, ignore_errors=True)
        os.replace(new, final)


class WritesIntoTheSameStep(others.Marked):
    """The mark of the first save stays while parts of the second are written."""

    def save(self, step, shards, sizes):
        new = self.folder / f"{step}-0-{dist.get_world_size()}"
        new.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        own = {name: (each.clone(), sizes[name]) for name, each in shards.items()}
        torch.save(own, new / f"shard-{dist.get_rank()}")
        dist.barrier()
        (new / "DONE").touch()
        dist.barrier()

    def load(self):
        whole = [each.parent for each in self.folder.glob("*/DONE")]
        if not whole:
            raise FileNotFoundError(self.folder)
        step, number, saved = max(tuple(map(int, each.name.split("-"))) for each in whole)
        parts = [torch.load(self.folder / f"{step}-{number}-{saved}" / f"shard-{rank}") for rank in range(saved)]
        found = {}
        for name, (_, size) in parts[0].items():
            whole = torch.cat([part[name][0] for part in parts])[:size]
            found[name] = cut(whole, dist.get_rank(), dist.get_world_size())
        return step, found


class SavedAlready(Renamed):
    """A step that is there is not saved again."""

    def save(self, step, shards, sizes):
        if step not in self.steps():
            super().save(step, shards, sizes)


class RenamesOntoAFolder(Renamed):
    """os.replace does not replace a folder with files in it."""

    def commit(self, new, final):
        os.replace(new, final)


class RanksDoNotWait(Renamed):
    """No barrier last: a rank is out of save() before rank 0 has renamed."""

    def save(self, step, shards, sizes):
        new = self.folder / f"step-{step}.tmp"
        self.begin(new)
        self.write(new, shards, sizes)
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(0.3)  # a slow disk
            self.commit(new, self.folder / f"step-{step}")


class ByTorch:
    """torch.distributed.checkpoint within, and a rename."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def save(self, step, shards, sizes):
        import torch.distributed.checkpoint as dcp

        rank, world_size, new = dist.get_rank(), dist.get_world_size(), self.folder / f"step-{step}.tmp"
        own = {f"{name}.{rank}": shard.clone() for name, shard in shards.items()}
        dcp.save(own, checkpoint_id=str(new))
        if rank == 0:
            kinds = {name: (len(shard), str(shard.dtype)[6:], sizes[name]) for name, shard in shards.items()}
            (new / "kinds").write_text(json.dumps([world_size, kinds]))
            shutil.rmtree(self.folder / f"step-{step}", ignore_errors=True)
            os.replace(new, self.folder / f"step-{step}")
        dist.barrier()

    def load(self):
        import torch.distributed.checkpoint as dcp

        steps = {int(each.name[5:]): each for each in self.folder.glob("step-*") if each.suffix != ".tmp"}
        if not steps:
            raise FileNotFoundError(self.folder)
        saved, kinds = json.loads((steps[max(steps)] / "kinds").read_text())
        parts = {
            f"{name}.{rank}": torch.empty(length, dtype=getattr(torch, dtype))
            for name, (length, dtype, _) in kinds.items()
            for rank in range(saved)
        }
        dcp.load(parts, checkpoint_id=str(steps[max(steps)]))
        found = {}
        for name, (_, _, size) in kinds.items():
            whole = torch.cat([parts[f"{name}.{rank}"] for rank in range(saved)])[:size]
            found[name] = cut(whole, dist.get_rank(), dist.get_world_size())
        return max(steps), found


WRONG = [
    (RemovesOlderOnesFirst, "gap"),
    (RemovesTheSameStepFirst, "gap"),
    (NoNameForAMoment, "gap"),
    (WritesIntoTheSameStep, "mark_torn"),
    (SavedAlready, "not_saved_again"),
    (RenamesOntoAFolder, "second_save"),
    (RanksDoNotWait, "not_there"),
]

CHEATS = [
    (ByTorch, "ready_made"),
]
