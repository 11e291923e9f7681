"""Right answers to exercise 4.5, `ShardedCheckpoint`, written differently. Wrong ones derive from the first.

What is judged, and in which order, stands in `labkit.labs.lab04.checkpoint`.
"""

import json
import os
import pickle
import shutil
from pathlib import Path

import torch
import torch.distributed as dist


def cut(whole, rank, world_size):
    """Part `rank` of a flat tensor, padded with zeros."""
    size = -(-whole.numel() // world_size)
    mine = whole[rank * size : (rank + 1) * size]
    return torch.cat([mine, mine.new_zeros(size - mine.numel())])


class Renamed:
    """A folder a step under another name, renamed by rank 0 when all are done."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def save(self, step, shards, sizes):
        new = self.folder / f"step-{step}.tmp"
        self.begin(new)
        self.write(new, shards, sizes)
        dist.barrier()
        if dist.get_rank() == 0:
            self.commit(new, self.folder / f"step-{step}")
        dist.barrier()

    def begin(self, new):
        if dist.get_rank() == 0:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
        dist.barrier()

    def write(self, new, shards, sizes):
        own = {name: shard.clone() for name, shard in shards.items()}
        torch.save({"shards": own, "sizes": sizes}, new / f"{dist.get_rank()}.pt")

    def commit(self, new, final):
        """An older save of the step stands aside, and is loaded, until the new one has the name."""
        aside = final.with_suffix(".old")
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(final, aside)
        os.replace(new, final)
        shutil.rmtree(aside, ignore_errors=True)

    def steps(self):
        whole = [each for each in self.folder.glob("step-*") if each.suffix != ".tmp"]
        return {int(each.stem[5:]): each for each in sorted(whole, reverse=True)}

    def load(self):
        steps = self.steps()
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.folder}")
        return max(steps), self.read(steps[max(steps)])

    def read(self, folder):
        parts = [torch.load(folder / f"{number}.pt") for number in range(len(list(folder.glob("*.pt"))))]
        return {name: self.part(name, size, parts) for name, size in parts[0]["sizes"].items()}

    def part(self, name, size, parts):
        whole = torch.cat([part["shards"][name] for part in parts])[:size]
        return cut(whole, dist.get_rank(), dist.get_world_size())


class Marked(Renamed):
    """An empty file DONE makes a folder of a new name count; the world size is in it, and older ones are removed."""

    def save(self, step, shards, sizes):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        number = 1 + max((int(each.name.split("-")[1]) for each in self.folder.glob("*-*-*")), default=0)
        new = self.folder / f"{step}-{number}-{world_size}"
        dist.barrier()
        new.mkdir(parents=True, exist_ok=True)
        with open(new / f"shard-{rank}", "wb") as file:
            pickle.dump({name: (each.clone(), sizes[name]) for name, each in shards.items()}, file)
        done = torch.ones(())
        dist.all_reduce(done)
        if rank == 0:
            (new / "DONE").touch()
            for other in self.folder.iterdir():
                if other != new:
                    (other / "DONE").unlink(missing_ok=True)
                    shutil.rmtree(other)
        dist.barrier()

    def load(self):
        whole = [each.parent for each in self.folder.glob("*/DONE")]
        if not whole:
            raise FileNotFoundError(self.folder)
        step, number, saved = max(tuple(map(int, each.name.split("-"))) for each in whole)
        newest = self.folder / f"{step}-{number}-{saved}"
        parts = [pickle.loads((newest / f"shard-{rank}").read_bytes()) for rank in range(saved)]
        found = {}
        for name, (_, size) in parts[0].items():
            whole = torch.cat([part[name][0] for part in parts])[:size]
            found[name] = cut(whole, dist.get_rank(), dist.get_world_size())
        return step, found


class Latest(Renamed):
    """A pointer "latest" that is replaced at once; parts in folders of ever new names; no padding is written."""

    def save(self, step, shards, sizes):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.folder.mkdir(parents=True, exist_ok=True)
        number = torch.tensor([1 + max([int(each.name) for each in self.folder.glob("[0-9]*")], default=0)])
        dist.broadcast(number, src=0)
        new = self.folder / str(int(number))
        new.mkdir(exist_ok=True)
        for name, shard in shards.items():
            kept = max(0, min(shard.numel(), sizes[name] - rank * shard.numel()))
            torch.save(shard[:kept].clone(), new / f"{name}.{rank}")
        dist.barrier()
        if rank == 0:
            pointer = self.folder / "latest.new"
            pointer.write_text(json.dumps({"folder": new.name, "step": step, "ranks": world_size, "sizes": sizes}))
            os.replace(pointer, self.folder / "latest")
        dist.barrier()

    def load(self):
        told = json.loads((self.folder / "latest").read_text())  # FileNotFoundError where there is none
        found = {}
        for name in told["sizes"]:
            parts = [torch.load(self.folder / told["folder"] / f"{name}.{rank}") for rank in range(told["ranks"])]
            found[name] = cut(torch.cat(parts), dist.get_rank(), dist.get_world_size())
        return told["step"], found


class OneFile(Renamed):
    """All ranks write into one file, each at its place; it takes its name when all are done."""

    def save(self, step, shards, sizes):
        rank = dist.get_rank()
        new = self.folder / f"step-{step}.tmp"
        kinds = {name: (str(each.dtype)[6:], each.element_size(), sizes[name]) for name, each in shards.items()}
        if rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(new, "wb") as file:
                file.write(json.dumps(kinds).encode().ljust(1000))
        dist.barrier()
        at = 1000
        with open(new, "r+b") as file:
            for name, shard in shards.items():
                first = rank * shard.numel()
                kept = max(0, min(shard.numel(), sizes[name] - first))
                file.seek(at + first * shard.element_size())
                file.write(bytes(shard[:kept].clone().view(torch.uint8).tolist()) if kept else b"")
                at += sizes[name] * shard.element_size()
        dist.barrier()
        if rank == 0:
            os.rename(new, self.folder / f"step-{step}")
        dist.barrier()

    def load(self):
        steps = self.steps() if self.folder.exists() else {}
        if not steps:
            raise FileNotFoundError("nothing saved yet")
        data = bytearray(steps[max(steps)].read_bytes())
        at, found = 1000, {}
        for name, (dtype, width, size) in json.loads(data[:1000]).items():
            whole = torch.frombuffer(data[at : at + size * width], dtype=getattr(torch, dtype))
            found[name] = cut(whole, dist.get_rank(), dist.get_world_size())
            at += size * width
        return max(steps), found


class EachItsMark(Renamed):
    """No rank does what others wait for: every rank marks its own part, and all marks are asked for."""

    def save(self, step, shards, sizes):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        number = 1 + len(list(self.folder.glob("*.of.*")))  # no folder is used twice
        new = self.folder / f"{step}.{number}.of.{world_size}"
        dist.barrier()
        new.mkdir(parents=True, exist_ok=True)
        own = {name: each.clone() for name, each in shards.items()}
        torch.save((own, sizes), new / f"{rank}.pt")
        (new / f"{rank}.done").touch()
        dist.barrier()

    def load(self):
        found = []
        for each in self.folder.glob("*.of.*"):
            step, number, _, world_size = each.name.split(".")
            if len(list(each.glob("*.done"))) == int(world_size):
                found.append((int(step), int(number), int(world_size), each))
        if not found:
            raise FileNotFoundError("no whole checkpoint")
        step, _, world_size, folder = max(found)
        parts = [torch.load(folder / f"{rank}.pt", mmap=True) for rank in range(world_size)]
        shards = {}
        for name, size in parts[0][1].items():
            whole = torch.cat([own[name] for own, _ in parts])[:size]
            shards[name] = cut(whole, dist.get_rank(), dist.get_world_size())
        return step, shards


RIGHT = [Renamed, Marked, Latest, OneFile, EachItsMark]
