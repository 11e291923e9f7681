"""Cheats on exercise 5.2, `DiskAdam`: right weights by another way than the exercise asks for.

Each must be refused, and told what gave it away.
"""

import ctypes
import mmap
import shutil
import subprocess
import sys
from pathlib import Path

import lab05_disk
import lab05_disk_right
import numpy as np
import torch

Mapped = lab05_disk_right.Mapped


class CachesInAClosure(Mapped):
    """Files are made and never touched again; the state is in a closure."""

    def open(self, number, p):
        s = {key: value.clone() for key, value in super().open(number, p).items()}
        return lambda: s

    @torch.no_grad()
    def step(self):
        for p, give in zip(self.parameters, self.state, strict=True):
            if p.grad is not None:
                give()["t"].add_(1)
                self.one(p, give())


class CachesInNumpy(Mapped):
    """The same in arrays of numpy, which no search for tensors finds."""

    def open(self, number, p):
        return {key: value.numpy().copy() for key, value in super().open(number, p).items()}

    @torch.no_grad()
    def step(self):
        for p, s in zip(self.parameters, self.state, strict=True):
            if p.grad is not None:
                s["t"] += 1
                self.one(p, {key: torch.from_numpy(value) for key, value in s.items()})


class CachesInBytes(Mapped):
    """In pickled bytes."""

    def open(self, number, p):
        return bytes(torch.stack(list(super().open(number, p).values())[1:]).numpy().tobytes()), 0

    @torch.no_grad()
    def step(self):
        for number, p in enumerate(self.parameters):
            if p.grad is not None:
                data, t = self.state[number]
                rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(3, -1)
                self.one(p, dict(zip(self.rows, rows, strict=True)) | {"t": torch.tensor(t + 1.0)})
                self.state[number] = rows.numpy().tobytes(), t + 1


class InSharedMemory(Mapped):
    """A folder in memory that looks like one on disk; the one that was given stays empty."""

    def __init__(self, parameters, folder, *args, **kwargs):
        memory = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / "labkit-cheat"
        shutil.rmtree(memory, ignore_errors=True)
        super().__init__(parameters, memory, *args, **kwargs)


class LinksToMemory(Mapped):
    """The folder holds links to files that lie in memory."""

    def path(self, number):
        home = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp")
        return home / f"labkit-cheat-{number}"

    def open(self, number, p):
        self.path(number).unlink(missing_ok=True)
        s = super().open(number, p)
        link = self.folder / f"{number}.bin"
        if not link.exists():
            link.symlink_to(self.path(number))
        return s


class AnotherProcessHoldsIt(Mapped):
    def step(self):
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        super().step()


class StopsTheCount(Mapped):
    """Switches tracemalloc off, and keeps all it wants."""

    def open(self, number, p):
        import tracemalloc

        tracemalloc.stop()
        return super().open(number, p)


class PatchedRoom(lab05_disk.WholeTensors):
    pass


def _patch_room():
    from labkit.labs.lab05 import disk

    disk.ROOM_BYTES = 10**9


PatchedRoom.notebook = _patch_room


class InSharedAnonymousMemory(Mapped):
    """State in anonymous maps; the files get a copy in each step."""

    def open(self, number, p):
        s = super().open(number, p)
        made = {}
        for key, value in s.items():
            made[key] = mmap.mmap(-1, 4 * value.numel())
            torch.frombuffer(made[key], dtype=torch.float32).copy_(value)
        return s, made

    @torch.no_grad()
    def step(self):
        for p, (s, made) in zip(self.parameters, self.state, strict=True):
            if p.grad is not None:
                own = {key: torch.frombuffer(value, dtype=torch.float32) for key, value in made.items()}
                own["t"].add_(1)
                self.one(p, own)
                for key, value in own.items():
                    s[key].copy_(value)


class InSmallArrays(Mapped):
    """State in many arrays of 8 kB, which are put together for a step."""

    def open(self, number, p):
        s = super().open(number, p)
        return s, {key: [each.numpy().copy() for each in value.split(2048)] for key, value in s.items()}

    @torch.no_grad()
    def step(self):
        for number, (p, (s, small)) in enumerate(zip(self.parameters, self.state, strict=True)):
            if p.grad is not None:
                for key, value in s.items():
                    value.copy_(torch.from_numpy(np.concatenate(small[key])))
                s["t"].add_(1)
                self.one(p, s)
                small = {key: [each.numpy().copy() for each in value.split(2048)] for key, value in s.items()}
                self.state[number] = s, small


class InPrivateAnonymousMemory(InSharedAnonymousMemory):
    """The same in maps for this process alone, which are no more in any count of Python's."""

    def open(self, number, p):
        s = Mapped.open(self, number, p)
        made = {}
        for key, value in s.items():
            made[key] = mmap.mmap(-1, 4 * value.numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            torch.frombuffer(made[key], dtype=torch.float32).copy_(value)
        return s, made


class InSmallBytes(Mapped):
    """State in very many small bytes, which are put together for a step."""

    def cut(self, s):
        whole = {key: value.numpy().tobytes() for key, value in s.items()}
        return {key: [each[at : at + 4096] for at in range(0, len(each), 4096)] for key, each in whole.items()}

    def open(self, number, p):
        s = super().open(number, p)
        return s, self.cut(s)

    @torch.no_grad()
    def step(self):
        for number, (p, (s, small)) in enumerate(zip(self.parameters, self.state, strict=True)):
            if p.grad is not None:
                for key, value in s.items():
                    value.copy_(torch.frombuffer(bytearray(b"".join(small[key])), dtype=torch.float32))
                s["t"].add_(1)
                self.one(p, s)
                self.state[number] = s, self.cut(s)


class InMemoryOfC(Mapped):
    """State in memory from malloc."""

    def open(self, number, p):
        s = super().open(number, p)
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        made = {}
        for key, value in s.items():
            kind = ctypes.c_float * value.numel()
            made[key] = torch.frombuffer(kind.from_address(libc.malloc(ctypes.sizeof(kind))), dtype=torch.float32)
            made[key].copy_(value)
        self.files = [*getattr(self, "files", ()), s]
        return made

    @torch.no_grad()
    def step(self):
        super().step()
        for s, made in zip(self.files, self.state, strict=True):
            for key, value in made.items():
                s[key].copy_(value)


CHEATS = [
    (InPrivateAnonymousMemory, "state_in_ram"),
    (InSmallBytes, ("state_in_ram", "not_in_pieces")),
    (InMemoryOfC, ("state_in_ram", "native_code_used")),
    (InSharedAnonymousMemory, "state_in_ram"),
    (InSmallArrays, "state_in_ram"),
    (CachesInAClosure, "state_in_ram"),
    (CachesInNumpy, "state_in_ram"),
    (CachesInBytes, ("state_in_ram", "not_in_pieces")),
    (InSharedMemory, "not_on_disk"),
    (LinksToMemory, ("state_in_ram", "not_on_disk")),
    (AnotherProcessHoldsIt, "process_started"),
    (StopsTheCount, ("raised", "measure_stopped")),
    (PatchedRoom, "patched"),
]
