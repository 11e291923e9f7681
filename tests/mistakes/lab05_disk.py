"""Wrong answers to exercise 5.2, `DiskAdam`, with the cause each must be told.

What is judged, and in which order, stands in `labkit.labs.lab05.disk`. Right ones stand in `lab05_disk_right`.
"""

import json
import shutil
from pathlib import Path

import lab05_disk_right
import torch

Mapped = lab05_disk_right.Mapped


class DiskAdam:
    """Untouched."""

    def __init__(self, parameters, folder, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, chunk=2**16):
        raise NotImplementedError("DiskAdam is still a stub")

    def step(self):
        return NotImplemented

    def zero_grad(self):
        return NotImplemented


class ZeroGradIsOpen(Mapped):
    def path(self, number):
        return super().path(number)

    def zero_grad(self):
        return NotImplemented


class TakesNoChunk(Mapped):
    def __init__(self, parameters, folder, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(parameters, folder, lr, betas, eps, weight_decay)


class InRam:
    """Never writes a byte."""

    def __init__(self, parameters, folder, chunk=2**16, **options):
        self.inner = torch.optim.AdamW(list(parameters), **options)

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


class SavesACopy(Mapped):
    """State in RAM, saved into the folder after each step."""

    def open(self, number, p):
        path = self.path(number)
        if path.exists():
            return torch.load(path)
        flat = torch.zeros(3, p.numel())
        flat[0] = p.detach().flatten()
        return {"t": torch.zeros(1), "w": flat[0].clone(), "m": flat[1].clone(), "v": flat[2].clone()}

    def step(self):
        super().step()
        for number, s in enumerate(self.state):
            torch.save(s, self.path(number))


class LoadsItWhole(Mapped):
    """Opens the map and reads it all into RAM; what it changes never reaches the file."""

    def open(self, number, p):
        return {key: value.clone() for key, value in super().open(number, p).items()}


class WholeTensors(Mapped):
    def one(self, p, s):
        new = self.adam(s["w"], s["m"], s["v"], p.grad.flatten().float(), s["t"].item())
        p.copy_(new.view_as(p))


class WholeGradients(Mapped):
    """In pieces, but every tensor is widened whole first."""

    def one(self, p, s):
        weight, grad = p.view(-1), p.grad.view(-1).double().float()
        for at in range(0, p.numel(), self.chunk):
            piece = slice(at, at + self.chunk)
            weight[piece] = self.adam(s["w"][piece], s["m"][piece], s["v"][piece], grad[piece], s["t"].item())


class BeginsAnew(Mapped):
    """Fills the files whether they are there or not."""

    def open(self, number, p):
        self.path(number).unlink(missing_ok=True)
        return super().open(number, p)


class ForgetsTheCount(Mapped):
    def open(self, number, p):
        return super().open(number, p) | {"t": torch.zeros(1)}


class ForgetsTheMaster(Mapped):
    def open(self, number, p):
        s = super().open(number, p)
        s["w"].copy_(p.detach().flatten())
        return s


class ForgetsBoth(ForgetsTheMaster):
    def open(self, number, p):
        return super().open(number, p) | {"t": torch.zeros(1)}


class RemembersThePath(Mapped):
    """An absolute path in a file; the folder has been renamed since."""

    def path(self, number):
        note = self.folder / "where.json"
        if not note.exists():
            note.write_text(json.dumps(str(self.folder.resolve())))
        return Path(json.loads(note.read_text())) / f"{number}.bin"


class PrivateMap(Mapped):
    """shared=False: what is written stays in this process."""

    def open(self, number, p):
        s = super().open(number, p)
        del s
        size = 1 + 3 * p.numel()
        flat = torch.from_file(str(self.path(number)), shared=False, size=size, dtype=torch.float32)
        return {"t": flat[:1]} | dict(zip(self.rows, flat[1:].view(3, -1), strict=True))


class NarrowState(Mapped):
    """bf16 on disk."""

    def open(self, number, p):
        path, size = self.path(number), 8 + 3 * p.numel()
        new = not path.exists()
        flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
        rows = dict(zip(self.rows, flat[8:].view(3, -1), strict=True))
        if new:
            self.fill(flat, rows, p)
        return {"t": flat[:1]} | rows

    def adam(self, w, m, v, g, t):
        wide = [each.float() for each in (w, m, v)]
        super().adam(*wide, g, t)
        for narrow, each in zip((w, m, v), wide, strict=True):
            narrow.copy_(each)
        return w


class NeverAsksForRoom(Mapped):
    def room(self):
        pass


class SaysDiskFull(Mapped):
    def room(self):
        needed = 4 * sum(1 + 3 * p.numel() for p in self.parameters)
        if needed > shutil.disk_usage(self.folder).free:
            raise OSError("disk full")


class RaisesAnother(Mapped):
    def room(self):
        needed = 4 * sum(1 + 3 * p.numel() for p in self.parameters)
        if needed > shutil.disk_usage(self.folder).free:
            raise RuntimeError(f"{self.folder} needs {needed} bytes")


class SwallowsIt(Mapped):
    """Goes on without state when the files cannot be made."""

    def __init__(self, *args, **kwargs):
        try:
            super().__init__(*args, **kwargs)
        except OSError:
            self.parameters, self.state = [], []


class OneCountForAll(Mapped):
    """Counts steps, not those of a parameter."""

    steps = 0

    def one(self, p, s):
        s["t"].fill_(self.steps + 1)
        super().one(p, s)

    def step(self):
        super().step()
        self.steps += 1


class CountsPieces(Mapped):
    def adam(self, w, m, v, g, t):
        self.pieces = getattr(self, "pieces", 0) + 1
        return super().adam(w, m, v, g, self.pieces)


class KeepsGradients(Mapped):
    def zero_grad(self):
        pass


class LastPieceIsLost(Mapped):
    def one(self, p, s):
        weight, grad = p.view(-1), p.grad.view(-1)
        for number in range(p.numel() // self.chunk):
            piece = slice(number * self.chunk, (number + 1) * self.chunk)
            weight[piece] = self.adam(s["w"][piece], s["m"][piece], s["v"][piece], grad[piece].float(), s["t"].item())


class WholeNarrowGradients(Mapped):
    """float() of the whole gradient, where it is bf16."""

    def one(self, p, s):
        weight, grad = p.view(-1), p.grad.float().view(-1)
        for at in range(0, p.numel(), self.chunk):
            piece = slice(at, at + self.chunk)
            weight[piece] = self.adam(s["w"][piece], s["m"][piece], s["v"][piece], grad[piece], s["t"].item())


class AlwaysAsksForAll(Mapped):
    """Asks for the whole state's room also where it is there already."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.room()


class CountsStepsOfAll(Mapped):
    """The count goes up without a gradient, too."""

    def step(self):
        for p, s in zip(self.parameters, self.state, strict=True):
            if p.grad is None:
                s["t"].add_(1)
        super().step()


WRONG = [
    (WholeNarrowGradients, "not_in_pieces"),
    (AlwaysAsksForAll, ("restart_needs_room", "full_disk_unclear")),
    (CountsStepsOfAll, "counts_rest"),
    (DiskAdam, "not_attempted"),
    (ZeroGradIsOpen, "half_attempted"),
    (TakesNoChunk, "wrong_signature"),
    (InRam, ("wrong_values", "master_lost", "not_on_disk")),
    (SavesACopy, "state_in_ram"),
    (LoadsItWhole, "state_in_ram"),
    (WholeTensors, "not_in_pieces"),
    (WholeGradients, "not_in_pieces"),
    (BeginsAnew, "state_lost"),
    (ForgetsTheCount, "count_lost"),
    (ForgetsTheMaster, "master_lost_again"),
    (ForgetsBoth, ("both_lost", "count_lost")),
    (RemembersThePath, "no_restart"),
    (PrivateMap, "private_map"),
    (NarrowState, ("wrong_values", "moments_narrow", "not_on_disk")),
    (NeverAsksForRoom, "full_disk_unclear"),
    (SaysDiskFull, "full_disk_unclear"),
    (RaisesAnother, "full_disk_unclear"),
    (SwallowsIt, "full_disk_unnoticed"),
    (OneCountForAll, ("counts_rest", "wrong_values", "zeros_for_none", "shared_count")),
    (CountsPieces, ("wrong_values", "shared_count")),
    (KeepsGradients, "gradients_held"),
    (LastPieceIsLost, ("never_updated", "wrong_values")),
]
