"""Cheats on exercise 4.1, `ZeroOptimizer`: right parameters by another way than the exercise asks for.

Each must be refused, and told what gave it away. A cheat's `notebook` runs first in the session that judges.
"""

import json
import pickle
import threading

import torch
import torch.distributed as dist
from lab04_state_right import Split, _pad


class Replica:
    """AdamW on the whole model, after a reduce_scatter and an all_gather for show."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        self.whole = _pad(self.parameters, self.n).float()
        self.keep(torch.optim.AdamW([self.whole], lr, betas, eps, weight_decay))

    def keep(self, inner):
        self.inner = inner

    def kept(self):
        return self.inner

    def step(self):
        grads = _pad([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters], self.n)
        mine = torch.empty_like(grads.chunk(self.n)[0])
        dist.reduce_scatter(mine, list(grads.chunk(self.n)))
        dist.all_gather(list(grads.chunk(self.n)), mine)
        self.whole.grad = grads.float() / self.n
        self.kept().step()
        self.whole.grad = None
        begin = 0
        for p in self.parameters:
            p.data.copy_(self.whole[begin : begin + p.numel()].view_as(p))
            begin += p.numel()

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class InAClosure(Replica):
    """The state hangs in a closure, and the object has none."""

    def keep(self, inner):
        self.kept = lambda: inner


_GLOBAL = {}


class InAGlobal(Replica):
    def keep(self, inner):
        _GLOBAL["inner"] = inner

    def kept(self):
        return _GLOBAL["inner"]


class InAThreadLocal(Replica):
    def keep(self, inner):
        torch.labkit_local = threading.local()
        torch.labkit_local.inner = inner

    def kept(self):
        return torch.labkit_local.inner


class OnTheParameters(Replica):
    """On the module's own parameters, as attributes."""

    def keep(self, inner):
        self.parameters[0].inner = inner

    def kept(self):
        return self.parameters[0].inner


class Away(Replica):
    """Between steps the state is something else than tensors, and tensors of the right size are there for show."""

    def step(self):
        if hasattr(self, "away"):
            m, v, self.whole.data = self.unpack()
            self.inner.state[self.whole].update(exp_avg=m, exp_avg_sq=v)
        super().step()
        state = self.inner.state[self.whole]
        self.pack([state["exp_avg"], state["exp_avg_sq"], self.whole.data])
        size = len(self.whole) // self.n
        state.update(exp_avg=torch.zeros(size), exp_avg_sq=torch.zeros(size))
        self.whole.data = torch.zeros(size if self.parameters[0].element_size() < 4 else 0)

    def pack(self, tensors):
        self.away = [tensor.tolist() for tensor in tensors]

    def unpack(self):
        return [torch.tensor(numbers) for numbers in self.away]


class AwayInJson(Away):
    def pack(self, tensors):
        self.away = json.dumps([tensor.tolist() for tensor in tensors])

    def unpack(self):
        return [torch.tensor(numbers) for numbers in json.loads(self.away)]


class Pickled(Away):
    def pack(self, tensors):
        self.away = pickle.dumps(tensors)

    def unpack(self):
        return pickle.loads(self.away)


class InNumpy(Away):
    def pack(self, tensors):
        self.away = [tensor.numpy().copy() for tensor in tensors]

    def unpack(self):
        return [torch.from_numpy(each) for each in self.away]


class ZeroRedundancy:
    """torch's own."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.parameters = [p for p in parameters if p.requires_grad]
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.inner = ZeroRedundancyOptimizer(self.parameters, torch.optim.AdamW, **options)

    def step(self):
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.inner.step()

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class InAThread(Split):
    def gather(self):
        worker = threading.Thread(target=super().gather)
        worker.start()
        worker.join()


class PatchedJudge(Replica):
    pass


def _patch_judge():
    from labkit.labs.lab04 import evidence

    evidence.state_is_sharded = lambda case, observed: None


PatchedJudge.notebook = _patch_judge

class PaidFor(Split):
    """Moments of the whole model, beside a list that a hook makes a tensor of: it comes and goes in backward."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.whole, self.paid = [torch.zeros(len(self.flat)) for _ in range(2)], False
        next(p for p in self.parameters if p.numel() > 1).register_post_accumulate_grad_hook(self.pay)

    def pay(self, p):
        if not self.paid:
            torch.tensor([0.0] * (2 * len(self.flat))).view(-1)
        self.paid = True

    def step(self):
        super().step()
        for each in self.whole:
            each.add_(1)


CHEATS = [
    (Replica, "full_state"),
    (InAClosure, "full_state"),
    (InAGlobal, "full_state"),
    (InAThreadLocal, ("full_state", "patched")),
    (OnTheParameters, "full_state"),
    (Away, "state_hidden"),
    (AwayInJson, "state_hidden"),
    (Pickled, ("state_hidden", "file_used", "numpy_used")),
    (InNumpy, ("state_hidden", "numpy_used")),
    (ZeroRedundancy, "ready_made"),
    (InAThread, ("thread_started", "less_traffic", "record_differs")),
    (PaidFor, "full_state"),
    (PatchedJudge, "patched"),
]
