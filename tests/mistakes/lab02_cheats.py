"""Cheats on exercises 2.1 and 2.2: right gradients by another way than the exercise asks for.

Each must be refused, and told what gave it away. Where two pieces of evidence catch the same cheat, either cause will
do. A cheat's `notebook` runs first in the session that judges, as a cell would.
"""

import linecache
import os
import pickle
import sys
import tempfile
import threading
from importlib import _bootstrap_external as external

import lab02_average
import lab02_bucketed_right
import torch
import torch.distributed as dist
from torch.utils import _python_dispatch as dispatch

FlatBuckets = lab02_bucketed_right.FlatBuckets


# 2.1


def with_modes_off(model):
    with dispatch._disable_current_modes():
        lab02_average.one_by_one(model)


def in_a_thread(model):
    worker = threading.Thread(target=lab02_average.one_by_one, args=(model,))
    worker.start()
    worker.join()


def through_the_store(model):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    for number, p in enumerate(lab02_average._zeros_where_none(model)):
        store.set(f"labkit-{number}-{rank}", repr(p.grad.flatten().tolist()))
        parts = [eval(store.get(f"labkit-{number}-{other}").decode()) for other in range(world_size)]
        p.grad.copy_(torch.tensor(parts, dtype=p.grad.dtype).mean(0).view_as(p))


def through_files(model):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = os.path.join(tempfile.gettempdir(), f"labkit-mean-{os.getppid()}-{world_size}-{{}}")
    grads = [p.grad for p in lab02_average._zeros_where_none(model)]
    torch.save(grads, path.format(rank))
    dist.barrier()
    everyone = [torch.load(path.format(other)) for other in range(world_size)]
    dist.barrier()
    os.remove(path.format(rank))
    for grad, *parts in zip(grads, *everyone, strict=True):
        grad.copy_(sum(parts) / world_size)


def hard_coded(model):
    for p in lab02_average._zeros_where_none(model):
        p.grad.fill_(0.01)


def looks_in_the_callers_frames(model):
    frame = sys._getframe(1)
    while frame is not None:
        seeds = frame.f_locals.get("seeds")
        frame = frame.f_back
    if not seeds:
        lab02_average.one_by_one(model)


def patches_all_reduce(model):
    real = dist.all_reduce
    dist.all_reduce = lambda tensor: real(tensor)
    lab02_average.one_by_one(model)


def patched_comparison(model):
    return None


def _patch_comparison():
    from labkit.labs.lab02 import average_told

    average_told.close = lambda got, due, absent=True: True


patched_comparison.notebook = _patch_comparison


def through_files_of_the_library(model):
    """Written and read by the standard library's own code, which no watch on files counts as the answer's."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = os.path.join(tempfile.gettempdir(), f"labkit-lines-{os.getppid()}-{world_size}-{{}}")
    grads = [p.grad for p in lab02_average._zeros_where_none(model)]
    external._write_atomic(path.format(rank), repr([grad.flatten().tolist() for grad in grads]).encode())
    dist.barrier()
    everyone = [eval("".join(linecache.getlines(path.format(other)))) for other in range(world_size)]
    dist.barrier()
    os.remove(path.format(rank))
    for grad, *parts in zip(grads, *everyone, strict=True):
        grad.copy_(torch.tensor(parts, dtype=grad.dtype).mean(0).view_as(grad))


def calls_everything_the_same(model):
    """Replaces the judge's comparison in a rank, then changes parameters."""
    from labkit.labs.lab02 import average

    average.same = lambda one, other: True
    lab02_average.one_by_one(model)
    for p in model.parameters():
        p.data += 1.0


AVERAGE = [
    (with_modes_off, ("modes_disabled", "record_differs")),
    (in_a_thread, ("thread_started", "record_differs")),
    (through_the_store, "store_used"),
    (through_files, "file_used"),
    (hard_coded, ("wrong_values", "not_divided", "fixed_number")),
    (looks_in_the_callers_frames, "frame_read"),
    (patches_all_reduce, "patched"),
    (patched_comparison, "patched"),
    (through_files_of_the_library, ("no_traffic", "file_used")),
    (calls_everything_the_same, ("parameters_changed", "patched")),
]


# 2.2


class TorchDDP(torch.nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.inner = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=bucket_bytes / 2**20)

    def forward(self, *args):
        return self.inner(*args)

    def finish(self):
        pass


class TorchDDPWithAPythonHook(torch.nn.Module):
    """Its reducer calls back, so that every all_reduce comes from Python."""

    def __init__(self, module, bucket_bytes):
        super().__init__()
        cap = bucket_bytes / 2**20
        self.inner = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=cap, find_unused_parameters=True)
        self.inner.register_comm_hook(None, self.reduce)

    @staticmethod
    def reduce(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def forward(self, *args):
        return self.inner(*args)

    def finish(self):
        pass


class Replicate(torch.nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        from torch.distributed._composable.replicate import replicate

        self.inner = replicate(module, bucket_cap_mb=bucket_bytes / 2**20)

    def forward(self, *args):
        return self.inner(*args)

    def finish(self):
        pass


class FullyShard(torch.nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        from torch.distributed.fsdp import fully_shard

        lab02_bucketed_right._broadcast(module)
        self.inner = fully_shard(module)

    def forward(self, *args):
        return self.inner(*args)

    def finish(self):
        pass


class WaitsAtOnce(FlatBuckets):
    """Asynchronous by name."""

    def send(self):
        super().send()
        self.works[-1][1].wait()


class AllAtTheLastHook(FlatBuckets):
    """Issued within backward, and waited for in finish, when nothing is left to hide behind."""

    def ready(self, parameter):
        self.left[self.bucket_of[parameter]] -= 1
        if not any(self.left):
            while len(self.works) < len(self.buckets):
                self.send()


class ZerosInTheLastStep(AllAtTheLastHook):
    """Right and late in the large model's first step; zeros, sent early, in the last."""

    def begin(self):
        super().begin()
        self.step = getattr(self, "step", -1) + 1

    def ready(self, parameter):
        if self.step and len(self.bucket_of) > 30:
            while len(self.works) < len(self.buckets):
                self.send()
        else:
            super().ready(parameter)

    def together(self, bucket):
        flat = super().together(bucket)
        return torch.zeros_like(flat) if self.step and len(self.bucket_of) > 30 else flat


class WorksForShow(AllAtTheLastHook):
    """Products of nothing, between the last issue and the first wait."""

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        show = torch.ones(700, 700)
        for _ in range(12):
            show = show @ show / 700
        super().finish()


class WorksForShowInAGraph(AllAtTheLastHook):
    """The same by a backward of its own, which autograd runs."""

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        show = torch.ones(600, 600, requires_grad=True)
        torch.autograd.grad((show @ show @ show @ show @ show).sum(), show)
        super().finish()


class WorksForShowInBackward(FlatBuckets):
    """The graph of the loss has a part that gives nothing, and whose backward comes last."""

    def forward(self, *args):
        first = self.buckets[-1][-1]
        show = first.flatten()[:1].expand(640, 640) * 1.0
        nothing = (show @ show @ show).sum() * 0.0
        out = self.module(*args)
        return out + nothing.to(out.dtype)


class AllGathers(FlatBuckets):
    """Every rank gets every gradient, and averages for itself."""

    def send(self):
        flat = self.together(self.buckets[len(self.works)])
        everyone = torch.empty(dist.get_world_size() * flat.numel(), dtype=flat.dtype)
        self.works.append((everyone, dist.all_gather_into_tensor(everyone, flat, async_op=True)))

    def apart(self, flat, bucket):
        super().apart(flat.view(dist.get_world_size(), -1).sum(0), bucket)


class WholeBatchEverywhere(torch.nn.Module):
    """Gathers the inputs and outputs' gradients, and computes everybody's: a replica, fed the whole batch."""

    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module = module
        lab02_bucketed_right._broadcast(module)

    def forward(self, *args):
        world_size = dist.get_world_size()
        self.args = []
        for arg in args:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
            dist.all_gather(sizes, torch.tensor([len(arg)]))
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, *arg.shape[1:], dtype=arg.dtype)
            padded[: len(arg)] = arg
            everyone = [torch.empty_like(padded) for _ in range(world_size)]
            dist.all_gather(everyone, padded)
            self.args.append([each[: int(size)] for each, size in zip(everyone, sizes, strict=True)])
        self.out = self.module(*args).detach().requires_grad_()
        return self.out

    def finish(self):
        world_size = dist.get_world_size()
        everyone = [torch.empty_like(self.out) for _ in range(world_size)]
        dist.all_gather(everyone, self.out.grad)
        for rank in range(world_size):
            out = self.module(*(arg[rank] for arg in self.args))
            out.backward(everyone[rank] / world_size)


class ThroughTheStore(FlatBuckets):
    def finish(self):
        self.rounds = getattr(self, "rounds", 0) + 1
        rank, world_size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        for number, p in enumerate(self.bucket_of):
            key = f"labkit-{self.rounds}-{number}-"
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            store.set(f"{key}{rank}", pickle.dumps(grad))
            parts = [pickle.loads(store.get(f"{key}{other}")) for other in range(world_size)]
            p.grad = sum(part.double() for part in parts).to(p.dtype) / world_size

    def ready(self, parameter):
        pass


class ThroughNumpy(FlatBuckets):
    def together(self, bucket):
        flat = super().together(bucket)
        return torch.from_numpy(flat.numpy()) if flat.dtype != torch.bfloat16 else flat


class InAThread(FlatBuckets):
    """Sends from a thread that runs beside backward."""

    def send(self):
        flat = self.together(self.buckets[len(self.works)])
        worker = threading.Thread(target=dist.all_reduce, args=(flat,))
        worker.start()
        worker.join()
        self.works.append((flat, worker))

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        for (flat, _), bucket in zip(self.works, self.buckets, strict=True):
            self.apart(flat / dist.get_world_size(), bucket)
        self.begin()


class WithModesOff(FlatBuckets):
    def send(self):
        with dispatch._disable_current_modes():
            super().send()


class PatchedJudge(FlatBuckets):
    pass


def _patch_judge():
    from labkit.labs.lab02 import bucketed_evidence

    bucketed_evidence.MOST_EXPOSED = 100.0


PatchedJudge.notebook = _patch_judge

BUCKETED = [
    (TorchDDP, "ready_made"),
    (TorchDDPWithAPythonHook, "ready_made"),
    (Replicate, "ready_made"),
    (FullyShard, "ready_made"),
    (WaitsAtOnce, "waits_early"),
    (AllAtTheLastHook, "no_overlap"),
    (ZerosInTheLastStep, "later_steps"),
    (WorksForShow, "fake_work"),
    (WorksForShowInAGraph, "fake_work"),
    (WorksForShowInBackward, "fake_work"),
    (AllGathers, "all_gather"),
    (WholeBatchEverywhere, "all_gather"),
    (ThroughTheStore, ("no_traffic", "after_backward", "store_used")),
    (ThroughNumpy, "numpy_used"),
    (InAThread, ("thread_started", "blocking", "no_traffic", "record_differs")),
    (WithModesOff, ("no_traffic", "modes_disabled", "record_differs")),
    (PatchedJudge, "patched"),
]
