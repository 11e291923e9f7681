"""Cheats on exercise 5.1, `OffloadedAdam`: right weights by another way than the exercise asks for.

Each must be refused, and told what gave it away.
"""

import gc
import threading

import lab05_offloaded_right
import torch

from labkit.labs.lab05 import TorchOnHost

HostAdam = lab05_offloaded_right.HostAdam
HOST = lab05_offloaded_right.HOST


class CopiesForShow(HostAdam):
    """State on the device; the copies to the host and back are never used."""

    def make(self, p):
        wide = p.detach().float()
        return {"w": wide, "m": torch.zeros_like(wide), "v": torch.zeros_like(wide), "t": 0, "show": super().make(p)}

    def take(self, p):
        p.grad.to(HOST)
        grad, p.grad = p.grad.float(), None
        return grad

    def put(self, p):
        p.copy_(self.state[p]["show"]["w"])
        p.data = self.state[p]["w"].to(p.dtype)


class InAClosure:
    """State on the device, in a closure that no attribute shows."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        parameters = [p for p in parameters if p.requires_grad]
        state = {p: [torch.zeros_like(p.detach().float()) for _ in range(2)] for p in parameters}
        inner = HostAdam([], lr, betas, eps, weight_decay)
        masters, counts = {p: p.detach().float() for p in parameters}, dict.fromkeys(parameters, 0)

        @torch.no_grad()
        def update(p):
            p.grad.cpu()
            s = {"w": masters[p], "m": state[p][0], "v": state[p][1], "t": counts[p]}
            inner.adam(s, p.grad.float())
            counts[p] = s["t"]
            p.copy_(masters[p].to(p.dtype).cpu())
            p.grad = None

        for p in parameters:
            p.register_post_accumulate_grad_hook(update)

    def step(self):
        pass

    def zero_grad(self):
        pass


class Unwraps(HostAdam):
    """Takes the numbers out of the device's tensors, past every copy."""

    def take(self, p):
        grad, p.grad = p.grad._inner.float(), None
        return grad

    def put(self, p):
        p._inner.copy_(self.state[p]["w"])


class WritesTheBook(Unwraps):
    """And writes into the book what was not done."""

    def take(self, p):
        p._book.write("down", "to", p.grad.nbytes)
        return super().take(p)

    def put(self, p):
        super().put(p)
        p._book.write("up", "copy_", p.nbytes)


class InAThread(HostAdam):
    def hook(self, p):
        worker = threading.Thread(target=self.update, args=(p,))
        worker.start()
        worker.join()


class LooksForTheBook(HostAdam):
    """Searches memory for the judge's own objects."""

    def step(self):
        for each in gc.get_objects():
            if type(each).__name__ == "Book":
                each.entries.clear()


class PatchesTheDevice(HostAdam):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        from labkit.labs.lab05 import device

        device.Book.write = lambda *args: None


class PatchedJudge(HostAdam):
    def hook(self, p):
        pass

    def step(self):
        for p in self.state:
            if p.grad is not None:
                self.update(p)


def _patch_judge():
    from labkit.labs.lab05 import offloaded_evidence

    offloaded_evidence.EARLY = 0.0


PatchedJudge.notebook = _patch_judge


class LabkitsOwnInside:
    """The ready-made one, kept and asked."""

    def __init__(self, parameters, **options):
        self.inner = TorchOnHost(parameters, **options)

    def step(self):
        return self.inner.step()

    def zero_grad(self):
        return self.inner.zero_grad()


class BuiltOnIt(LabkitsOwnInside):
    """The same at one remove."""


CHEATS = [
    (LabkitsOwnInside, "ready_made"),
    (BuiltOnIt, "ready_made"),
    (CopiesForShow, ("state_on_device", "never_updated", "raised")),
    (InAClosure, "state_on_device"),
    (Unwraps, "raised"),
    (WritesTheBook, "raised"),
    (InAThread, "thread_started"),
    (LooksForTheBook, ("frame_read", "raised")),
    (PatchesTheDevice, ("ready_made", "patched", "no_copies", "raised")),
    (PatchedJudge, "patched"),
]
