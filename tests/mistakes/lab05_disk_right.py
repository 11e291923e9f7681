"""Right answers to exercise 5.2, `DiskAdam`, written differently.

Most answers, wrong ones too, are built on `Mapped`, so that each shows what is its own.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import torch


class Mapped:
    """A file of fp32 numbers for each parameter, mapped: its count of steps, master, moments."""

    rows = ("w", "m", "v")

    def __init__(self, parameters, folder, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, chunk=2**16):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.lr, self.betas, self.eps, self.weight_decay, self.chunk = lr, betas, eps, weight_decay, chunk
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.path(0).exists():
            self.room()
        self.state = [self.open(number, p) for number, p in enumerate(self.parameters)]

    def path(self, number):
        return self.folder / f"{number}.bin"

    def room(self):
        needed = 4 * sum(1 + len(self.rows) * p.numel() for p in self.parameters)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(f"{self.folder} needs {needed} bytes for Adam's state, and {free} are free")

    def open(self, number, p):
        path, size = self.path(number), 1 + len(self.rows) * p.numel()
        new = not path.exists()
        flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.float32)
        rows = dict(zip(self.rows, flat[1:].view(len(self.rows), -1), strict=True))
        if new:
            self.fill(flat, rows, p)
        return {"t": flat[:1]} | rows

    def fill(self, flat, rows, p):
        flat.zero_()
        rows["w"].copy_(p.detach().flatten())

    @torch.no_grad()
    def step(self):
        for p, s in zip(self.parameters, self.state, strict=True):
            if p.grad is not None:
                s["t"].add_(1)
                self.one(p, s)

    def one(self, p, s):
        weight, grad = p.view(-1), p.grad.view(-1)
        for at in range(0, p.numel(), self.chunk):
            piece = slice(at, at + self.chunk)
            new = self.adam(s["w"][piece], s["m"][piece], s["v"][piece], grad[piece].float(), s["t"].item())
            weight[piece] = new

    def adam(self, w, m, v, g, t):
        b1, b2 = self.betas
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        w.mul_(1 - self.lr * self.weight_decay)
        w.addcdiv_(m / (1 - b1**t), (v / (1 - b2**t)).sqrt_().add_(self.eps), value=-self.lr)
        return w

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class ByNumpy(Mapped):
    """numpy.memmap, and arithmetic in numpy; the count in a file of its own."""

    def __init__(self, parameters, folder, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, chunk=2**16):
        super().__init__(parameters, folder, lr, betas, eps, weight_decay, chunk)

    def open(self, number, p):
        path = self.path(number)
        new = not path.exists()
        rows = np.memmap(path, dtype=np.float32, mode="w+" if new else "r+", shape=(3, max(1, p.numel())))
        counts = np.memmap(path.with_suffix(".t"), dtype=np.int64, mode="w+" if new else "r+", shape=(1,))
        if new:
            for at in range(0, p.numel(), self.chunk):
                rows[0, at : at + self.chunk] = p.detach().view(-1)[at : at + self.chunk].float().numpy()
        return {"t": counts, "rows": rows}

    def step(self):
        (b1, b2) = self.betas
        for p, s in zip(self.parameters, self.state, strict=True):
            if p.grad is None:
                continue
            s["t"] += 1
            t = int(s["t"][0])
            weight, grad = p.detach().view(-1), p.grad.view(-1)
            for at in range(0, p.numel(), self.chunk):
                w, m, v = (row[at : at + self.chunk] for row in s["rows"])
                g = grad[at : at + self.chunk].float().numpy()
                m[:] = b1 * m + (1 - b1) * g
                v[:] = b2 * v + (1 - b2) * g * g
                w *= 1 - self.lr * self.weight_decay
                w -= self.lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + self.eps)
                weight[at : at + self.chunk] = torch.from_numpy(np.array(w))


class ReadsAndWrites(Mapped):
    """Not mapped: each piece is read, changed and written back, as an asynchronous I/O library would."""

    def open(self, number, p):
        path = self.path(number)
        if not path.exists():
            with open(path, "wb") as file:
                file.write(np.zeros(1, np.float32).tobytes())
                for row in range(3):
                    for at in range(0, p.numel(), self.chunk):
                        piece = p.detach().view(-1)[at : at + self.chunk].float()
                        file.write((piece if row == 0 else piece * 0).numpy().tobytes())
        return path

    @torch.no_grad()
    def step(self):
        for p, path in zip(self.parameters, self.state, strict=True):
            if p.grad is not None:
                with open(path, "r+b") as file:
                    self.pieces(p, file)

    def pieces(self, p, file):
        t = np.frombuffer(file.read(4), np.float32)[0] + 1
        file.seek(0)
        file.write(np.float32(t).tobytes())
        for at in range(0, p.numel(), self.chunk):
            count = min(self.chunk, p.numel() - at)
            rows = []
            for row in range(3):
                file.seek(4 + 4 * (row * p.numel() + at))
                rows.append(torch.frombuffer(bytearray(file.read(4 * count)), dtype=torch.float32))
            self.adam(*rows, p.grad.view(-1)[at : at + count].float(), float(t))
            for row, piece in enumerate(rows):
                file.seek(4 + 4 * (row * p.numel() + at))
                file.write(piece.numpy().tobytes())
            p.view(-1)[at : at + count] = rows[0]


class OneFile(Mapped):
    """All parameters in one file, one after another, and the counts in another; asks by trying to reserve the room."""

    def room(self):
        needed = 4 * sum(3 * p.numel() for p in self.parameters)
        path = self.folder / "all.bin"
        try:
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, needed)
        except OSError as error:
            path.unlink()
            raise OSError(f"no room for {needed:,} bytes in {self.folder}: {error.strerror}") from error

    def path(self, number):
        return self.folder / "counts.bin"

    def open(self, number, p):
        if number == 0:
            self.new, self.at = not self.path(0).exists(), 0
            total = 3 * sum(each.numel() for each in self.parameters)
            path = str(self.folder / "all.bin")
            self.flat = torch.from_file(path, shared=True, size=total, dtype=torch.float32)
            count = len(self.parameters)
            self.counts = torch.from_file(str(self.path(0)), shared=True, size=count, dtype=torch.float32)
        rows = dict(zip(self.rows, self.flat[self.at : self.at + 3 * p.numel()].view(3, -1), strict=True))
        self.at += 3 * p.numel()
        if self.new:
            self.fill(self.counts[number : number + 1], rows, p)
        return {"t": self.counts[number : number + 1]} | rows

    def fill(self, flat, rows, p):
        flat.zero_()
        for at in range(0, p.numel(), self.chunk):
            rows["w"][at : at + self.chunk] = p.detach().view(-1)[at : at + self.chunk]


class MomentsOnly(Mapped):
    """fp32 weights are their own masters; bf16 ones have one on disk."""

    def open(self, number, p):
        s = super().open(number, p)
        if p.dtype == torch.float32:
            s["w"] = p.detach().view(-1)
        return s


RIGHT = [Mapped, ByNumpy, ReadsAndWrites, OneFile, MomentsOnly]
