"""Cheats on exercise 4.3, `ZeroParameters`: right parameters by another way than the exercise asks for.

Each must be refused, and told what gave it away.
"""

import array
import threading

import torch
import torch.distributed as dist
from lab04_parameters_right import Split


class Replica(torch.nn.Module):
    """Parameters stay whole, gradients are averaged, and parts go round for show."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__()
        self.module, self.n = module, dist.get_world_size()
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.masters = {p: p.data.float() for p in self.trained}
        self.inner = torch.optim.AdamW(self.masters.values(), lr, betas, eps, weight_decay)
        self.grads = {}
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.reduce)

    def forward(self, *args):
        return self.module(*args)

    def reduce(self, p):
        flat = torch.cat([p.grad.flatten(), p.new_zeros(-p.numel() % self.n)]).detach()
        mine = torch.empty_like(flat.chunk(self.n)[0])
        dist.reduce_scatter(mine, list(flat.chunk(self.n)))
        dist.all_gather(list(flat.chunk(self.n)), mine)
        p.grad = None
        grad = flat[: p.numel()].view_as(p).float() / self.n
        self.grads[p] = grad if p not in self.grads else self.grads[p] + grad

    def step(self):
        for p, master in self.masters.items():
            master.grad = self.grads.get(p)
        self.inner.step()
        for p, master in self.masters.items():
            master.grad = None
            p.data.copy_(master)

    def zero_grad(self):
        self.grads.clear()


class CopyInAClosure(Split):
    """Freed as asked, while a whole copy hangs in a closure, so that gathering is for show."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        copies = {p: p.detach().clone() for p in module.parameters()}
        super().__init__(module, lr, betas, eps, weight_decay)
        self.copy = lambda p: copies[p]

    def fill(self, p, full):
        super().fill(p, full)
        self.copy(p).copy_(p.data)


class FullyShard(torch.nn.Module):
    """torch's own, FSDP2."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__()
        from torch.distributed.fsdp import fully_shard

        for child in module.deep:
            fully_shard(child)
        self.module = fully_shard(module)
        trained = [p for p in module.parameters() if p.requires_grad]
        self.inner = torch.optim.AdamW(trained, lr, betas, eps, weight_decay, foreach=False)

    def forward(self, *args):
        return self.module(*args)

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


class InLists(Split):
    """Between steps whole parameters wait in Python's lists, and gathering is for show."""

    def step(self):
        super().step()
        self.lists = {p: self.gathered(p).tolist() for p in self.parts}

    def fill(self, p, full):
        if getattr(self, "lists", None):
            full = torch.tensor(self.lists[p], dtype=p.dtype)
        super().fill(p, full)


class ListsUntilBackward(Split):
    """From forward until backward whole parameters wait in Python's lists, and are not gathered again."""

    def keep(self, values):
        return values

    def gathered(self, p):
        if torch._C._current_graph_task_id() != -1:
            return torch.tensor(list(p.waits), dtype=p.dtype)
        full = super().gathered(p)
        if torch.is_grad_enabled():
            p.waits = self.keep(full.tolist())
        return full

    def clear(self, p):
        super().clear(p)
        p.waits = None


class ArraysUntilBackward(ListsUntilBackward):
    """The same, in four bytes a number."""

    def keep(self, values):
        return array.array("f", values)


class InAThread(Split):
    def scattered(self, p, grad):
        found = []
        worker = threading.Thread(target=lambda: found.append(super(InAThread, self).scattered(p, grad)))
        worker.start()
        worker.join()
        return found[0]


class PatchedJudge(Replica):
    pass


def _patch_judge():
    from labkit.labs.lab04 import parameters_held

    parameters_held.between = lambda case, observed: None


PatchedJudge.notebook = _patch_judge


class PaidFor(Split):
    """A replica that gathers in forward, for show; a list that becomes a tensor in backward is to pay for it."""

    def __init__(self, *args, **kwargs):
        self.paid = False
        super().__init__(*args, **kwargs)

    def free(self, parameters):
        pass

    def after_forward(self, owner, args, out):
        pass

    def reduce(self, p):
        if not self.paid:
            torch.tensor([0.0] * sum(each.numel() for each in self.parts)).view(-1)
        self.paid = True
        super().reduce(p)


CHEATS = [
    (Replica, ("parameters_kept", "full_state")),
    (CopyInAClosure, "parameters_kept"),
    (FullyShard, "ready_made"),
    (ListsUntilBackward, "hidden_until_backward"),
    (ArraysUntilBackward, "hidden_until_backward"),
    (InLists, ("more_traffic", "gathered_too_often", "state_hidden")),
    (InAThread, ("thread_started", "after_backward", "less_traffic", "record_differs", "state_hidden")),
    (PaidFor, "parameters_kept"),
    (PatchedJudge, "patched"),
]
