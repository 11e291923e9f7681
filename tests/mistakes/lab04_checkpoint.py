"""Wrong answers to exercise 4.5, `ShardedCheckpoint`, with the cause each must be told, and cheats.

Right ones, from which these derive, stand in `lab04_checkpoint_right`; what a step saved again, older ones removed, and
ranks that do not wait lead to, in `lab04_checkpoint_more`.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import lab04_checkpoint_more as more
import lab04_checkpoint_right as others
import torch
import torch.distributed as dist
from lab04_checkpoint_right import Latest, Renamed, cut
from torch.utils import _python_dispatch as dispatch

RIGHT = others.RIGHT


class InPlace(Renamed):
    """The same files each time."""

    def save(self, step, shards, sizes):
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {name: shard.clone() for name, shard in shards.items()}
        torch.save({"shards": own, "sizes": sizes, "step": step}, self.folder / f"{dist.get_rank()}.pt")
        dist.barrier()

    def load(self):
        parts = [torch.load(each) for each in sorted(self.folder.glob("*.pt"))]
        if not parts:
            raise FileNotFoundError(self.folder)
        return parts[0]["step"], {name: self.part(name, size, parts) for name, size in parts[0]["sizes"].items()}


class EachRenamesItsOwn(InPlace):
    """No file is ever cut, but the old checkpoint and the new one get mixed."""

    def save(self, step, shards, sizes):
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {name: shard.clone() for name, shard in shards.items()}
        new = self.folder / f"{dist.get_rank()}.new"
        torch.save({"shards": own, "sizes": sizes, "step": step}, new)
        os.replace(new, self.folder / f"{dist.get_rank()}.pt")
        dist.barrier()


class RemovesTheOldFirst(Renamed):
    def begin(self, new):
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        super().begin(new)


class NoMark(Renamed):
    """The newest folder is taken, whatever is in it."""

    def save(self, step, shards, sizes):
        new = self.folder / f"step-{step}"
        self.begin(new)
        self.write(new, shards, sizes)
        dist.barrier()


class RenamedTooEarly(Renamed):
    """Rank 0 does not wait for the others to be done."""

    def save(self, step, shards, sizes):
        new, final = self.folder / f"step-{step}.tmp", self.folder / f"step-{step}"
        self.begin(new)
        if dist.get_rank() == 0:
            self.commit(new, final)
        dist.barrier()
        self.write(final, shards, sizes)
        dist.barrier()


class MarkedByWhoIsFirst(others.Marked):
    """Every rank makes the mark when it is done itself."""

    def save(self, step, shards, sizes):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        new = self.folder / f"{step}-{world_size}"
        new.mkdir(parents=True, exist_ok=True)
        torch.save({name: (each.clone(), sizes[name]) for name, each in shards.items()}, new / f"shard-{rank}")
        (new / "DONE").touch()
        dist.barrier()

    def load(self):
        whole = [each.parent for each in self.folder.glob("*/DONE")]
        if not whole:
            raise FileNotFoundError(self.folder)
        newest = max(whole, key=lambda each: int(each.name.split("-")[0]))
        step, saved = map(int, newest.name.split("-"))
        parts = [torch.load(newest / f"shard-{rank}") for rank in range(saved)]
        found = {}
        for name, (_, size) in parts[0].items():
            whole = torch.cat([part[name][0] for part in parts])[:size]
            found[name] = cut(whole, dist.get_rank(), dist.get_world_size())
        return step, found


class PointerInPlace(Latest):
    """Writes the pointer where it stands: for a moment it is empty."""

    def save(self, step, shards, sizes):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        new = self.folder / f"parts-{step}-{world_size}"
        new.mkdir(parents=True, exist_ok=True)
        for name, shard in shards.items():
            torch.save(shard.clone(), new / f"{name}.{rank}")
        dist.barrier()
        if rank == 0:
            self.point({"folder": new.name, "step": step, "ranks": world_size, "sizes": sizes})
        dist.barrier()

    def point(self, told):
        (self.folder / "latest").write_text(json.dumps(told))

    def load(self):
        return self.pointed(json.loads((self.folder / "latest").read_text()))

    def pointed(self, told):
        found = {}
        for name, size in told["sizes"].items():
            parts = [torch.load(self.folder / told["folder"] / f"{name}.{rank}") for rank in range(told["ranks"])]
            found[name] = cut(torch.cat(parts)[:size], dist.get_rank(), dist.get_world_size())
        return told["step"], found


class PointerInPlaceByTorch(PointerInPlace):
    """The same by torch.save, which opens files in C++."""

    def point(self, told):
        torch.save(told, self.folder / "latest.pt")

    def load(self):
        return self.pointed(torch.load(self.folder / "latest.pt"))


class AGapBeforeTheRename(Renamed):
    """One name for the newest: the old one is removed, then the new one is renamed."""

    def save(self, step, shards, sizes):
        new = self.folder / "new"
        self.begin(new)
        self.write(new, shards, sizes)
        if dist.get_rank() == 0:
            (new / "step").write_text(str(step))
        dist.barrier()
        if dist.get_rank() == 0:
            self.commit(new, self.folder / "whole")
        dist.barrier()

    def load(self):
        folder = self.folder / "whole"
        return int((folder / "step").read_text()), self.read(folder)


class StepsAsText(Renamed):
    def load(self):
        steps = {str(step): each for step, each in self.steps().items()}
        if not steps:
            raise FileNotFoundError(self.folder)
        newest = sorted(steps)[-1]
        return int(newest), self.read(steps[newest])


class FirstOne(Renamed):
    def load(self):
        steps = self.steps()
        if not steps:
            raise FileNotFoundError(self.folder)
        return min(steps), self.read(steps[min(steps)])


class GathersToRankZero(Renamed):
    """As many a script does: rank 0 needs room for everything, and writes alone."""

    def write(self, new, shards, sizes):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        whole = {}
        for name, shard in shards.items():
            parts = [torch.empty_like(shard) for _ in range(world_size)] if rank == 0 else None
            dist.gather(shard.clone(), parts, dst=0)
            if rank == 0:
                whole[name] = torch.cat(parts)[: sizes[name]]
        if rank == 0:
            torch.save(whole, new / "whole.pt")

    def read(self, folder):
        whole = torch.load(folder / "whole.pt")
        return {name: cut(each, dist.get_rank(), dist.get_world_size()) for name, each in whole.items()}


class EverybodyWritesEverything(GathersToRankZero):
    def write(self, new, shards, sizes):
        whole = {}
        for name, shard in shards.items():
            everyone = shard.new_empty(dist.get_world_size() * shard.numel())
            parts = list(everyone.chunk(dist.get_world_size()))
            dist.all_gather(parts, shard.clone())
            whole[name] = torch.cat(parts)[: sizes[name]]
        torch.save(whole, new / f"whole-{dist.get_rank()}.pt")

    def read(self, folder):
        whole = torch.load(folder / "whole-0.pt")
        return {name: cut(each, dist.get_rank(), dist.get_world_size()) for name, each in whole.items()}


class SavesViews(Renamed):
    """torch.save writes the whole storage of a view."""

    def write(self, new, shards, sizes):
        torch.save({"shards": shards, "sizes": sizes}, new / f"{dist.get_rank()}.pt")


class KeepsTwoCopies(Renamed):
    def write(self, new, shards, sizes):
        super().write(new, shards, sizes)
        shutil.copy(new / f"{dist.get_rank()}.pt", new / f"{dist.get_rank()}.backup")


class OwnFileOnly(Renamed):
    """Resumes on as many ranks as saved."""

    def read(self, folder):
        return torch.load(folder / f"{dist.get_rank()}.pt")["shards"]


class KeepsThePadding(Renamed):
    def part(self, name, size, parts):
        return cut(torch.cat([part["shards"][name] for part in parts]), dist.get_rank(), dist.get_world_size())


class GivesTheWhole(Renamed):
    def part(self, name, size, parts):
        return torch.cat([part["shards"][name] for part in parts])[:size]


class NoPadding(Renamed):
    def part(self, name, size, parts):
        whole = torch.cat([part["shards"][name] for part in parts])[:size]
        length = -(-size // dist.get_world_size())
        return whole[dist.get_rank() * length :][:length]


class SavesFloats(Renamed):
    def write(self, new, shards, sizes):
        super().write(new, {name: shard.float() for name, shard in shards.items()}, sizes)


class RankZeroOnly(Renamed):
    """Right for a replica, of which every rank has the same."""

    def write(self, new, shards, sizes):
        if dist.get_rank() == 0:
            super().write(new, shards, sizes)

    def read(self, folder):
        return torch.load(folder / "0.pt")["shards"]


class Swallows(Renamed):
    def write(self, new, shards, sizes):
        try:
            super().write(new, shards, sizes)
        except (OSError, RuntimeError) as error:
            print(f"could not save: {error}")


class StartsAnewInSilence(Renamed):
    def load(self):
        return super().load() if self.steps() else (0, {})


class IndexError_(Renamed):
    def load(self):
        newest = sorted(self.steps())[-1]
        return newest, self.read(self.steps()[newest])


class ShardsOnly(Renamed):
    def load(self):
        return super().load()[1]


class StepAsTensor(Renamed):
    def load(self):
        step, shards = super().load()
        return torch.tensor(step), shards


class StumblesOverLeftovers(Renamed):
    def begin(self, new):
        if dist.get_rank() == 0:
            new.mkdir(parents=True)
        dist.barrier()


class TakesLeftoversIn(Renamed):
    """Parts of an interrupted save on 4 ranks stay in the folder in which 2 ranks save."""

    def begin(self, new):
        if dist.get_rank() == 0:
            new.mkdir(parents=True, exist_ok=True)
        dist.barrier()


class AbsoluteLink(Renamed):
    """Fine until the folder is moved."""

    def commit(self, new, final):
        super().commit(new, final)
        link = self.folder / "latest.new"
        link.symlink_to(final.absolute())
        os.replace(link, self.folder / "latest")

    def load(self):
        if not self.steps():
            raise FileNotFoundError(self.folder)
        folder = (self.folder / "latest").resolve(strict=True)
        return int(folder.name[5:]), self.read(folder)


WRONG = [
    (InPlace, "old_destroyed"),
    (EachRenamesItsOwn, ("old_destroyed", "mixed")),
    (RemovesTheOldFirst, "old_destroyed"),
    (NoMark, "partial_taken"),
    (RenamedTooEarly, "partial_taken"),
    (MarkedByWhoIsFirst, "partial_taken"),
    (PointerInPlace, "mark_torn"),
    (PointerInPlaceByTorch, "mark_torn"),
    (AGapBeforeTheRename, "gap"),
    (StepsAsText, "text_order"),
    (FirstOne, ("older_step", "text_order")),
    (GathersToRankZero, "gathered"),
    (EverybodyWritesEverything, "gathered"),
    (SavesViews, "whole_storage"),
    (KeepsTwoCopies, "written_twice"),
    (OwnFileOnly, "not_resharded"),
    (KeepsThePadding, "padding"),
    (GivesTheWhole, "whole_tensor"),
    (NoPadding, "padding"),
    (SavesFloats, "dtype_lost"),
    (RankZeroOnly, "other_ranks_part"),
    (Swallows, "error_swallowed"),
    (StartsAnewInSilence, "nothing_saved"),
    (IndexError_, "nothing_saved"),
    (ShardsOnly, "wrong_type"),
    (StepAsTensor, "wrong_type"),
    (StumblesOverLeftovers, "leftover"),
    (TakesLeftoversIn, "leftover"),
    (AbsoluteLink, "not_resharded"),
    *more.WRONG,
]


# Cheats


class InAnotherFolder(Renamed):
    """Beside the folder that was given, where nobody looks."""

    def __init__(self, folder):
        super().__init__(Path(tempfile.gettempdir()) / f"labkit-elsewhere-{os.getppid()}")
        Path(folder).mkdir(parents=True, exist_ok=True)


class CollectedThroughFiles(GathersToRankZero):
    """Rank 0 collects all parts through files, and leaves one file."""

    def write(self, new, shards, sizes):
        part = {name: shard.clone() for name, shard in shards.items()}
        torch.save(part, new / f"{dist.get_rank()}.part")
        dist.barrier()
        if dist.get_rank() == 0:
            parts = [torch.load(new / f"{rank}.part") for rank in range(dist.get_world_size())]
            whole = {name: torch.cat([each[name] for each in parts])[:size] for name, size in sizes.items()}
            torch.save(whole, new / "whole.pt")
            for rank in range(dist.get_world_size()):
                (new / f"{rank}.part").unlink()


class ThroughTheStore(Renamed):
    def begin(self, new):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"labkit-{dist.get_rank()}-{new.name}", "here")
        super().begin(new)


class WithModesOff(GathersToRankZero):
    def write(self, new, shards, sizes):
        with dispatch._disable_current_modes():
            super().write(new, shards, sizes)


class HardCoded(Renamed):
    def load(self):
        if not self.steps():
            raise FileNotFoundError(self.folder)
        step, shards = super().load()
        return step, {name: torch.zeros_like(each) for name, each in shards.items()}


class PatchedJudge(Renamed):
    def read(self, folder):
        return {}


def _patch_judge():
    from labkit.labs.lab04 import checkpoint_told

    checkpoint_told.wrong_load = lambda *args: None


PatchedJudge.notebook = _patch_judge

CHEATS = [
    *more.CHEATS,
    (InAnotherFolder, ("elsewhere", "nothing_saved", "not_resharded")),
    (CollectedThroughFiles, "one_writes"),
    (ThroughTheStore, "store_used"),
    (WithModesOff, ("modes_disabled", "record_differs", "one_writes")),
    (HardCoded, "wrong_values"),
    (PatchedJudge, "patched"),
]
