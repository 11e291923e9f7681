"""Answers to exercise 3.4, `DynamicLossScaler`: wrong ones with the cause each must be told, right ones, cheats.

What is judged, and in which order, stands in `labkit.labs.lab03.scaler`.
"""

import os
import pathlib
import sys
import tempfile
import threading

import torch
import torch.distributed as dist


class RightOne:
    def __init__(self, scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0):
        self.scale = scale
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.min_scale = growth_interval, min_scale
        self.good = 0

    def scale_loss(self, loss):
        return loss * self.scale

    def gradients(self, optimizer):
        return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    def overflow(self, optimizer):
        return not all(bool(grad.isfinite().all()) for grad in self.gradients(optimizer))

    def anywhere(self, overflow):
        flag = torch.tensor(float(overflow))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def unscale(self, optimizer):
        for grad in self.gradients(optimizer):
            grad /= self.scale

    def lower(self):
        self.scale = max(self.scale * self.backoff_factor, self.min_scale)
        self.good = 0

    def count(self):
        self.good += 1
        if self.good == self.growth_interval:
            self.scale *= self.growth_factor
            self.good = 0

    def step(self, optimizer):
        if self.anywhere(self.overflow(optimizer)):
            self.lower()
            return False
        self.unscale(optimizer)
        optimizer.step()
        self.count()
        return True


class LooksAtItsOwn(RightOne):
    def anywhere(self, overflow):
        return overflow


class LowersOnlyItsOwn(RightOne):
    def step(self, optimizer):
        mine = self.overflow(optimizer)
        if self.anywhere(mine):
            if mine:
                self.lower()
            return False
        self.unscale(optimizer)
        optimizer.step()
        self.count()
        return True


class LooksForNan(RightOne):
    def overflow(self, optimizer):
        return any(bool(grad.isnan().any()) for grad in self.gradients(optimizer))


class LooksForInfinity(RightOne):
    def overflow(self, optimizer):
        return any(bool(grad.isinf().any()) for grad in self.gradients(optimizer))


class FirstGroupOnly(RightOne):
    def gradients(self, optimizer):
        return [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]


class LooksAtTheLoss(RightOne):
    """The loss is nan only where nan was in the data."""

    def scale_loss(self, loss):
        self.loss = loss.detach()
        return super().scale_loss(loss)

    def overflow(self, optimizer):
        return not bool(self.loss.isfinite())


class NeverLooks(RightOne):
    def overflow(self, optimizer):
        return False


class StepsAnyway(RightOne):
    def step(self, optimizer):
        bad = self.anywhere(self.overflow(optimizer))
        self.unscale(optimizer)
        optimizer.step()
        if bad:
            self.lower()
        else:
            self.count()
        return True


class StepsAndSaysNo(RightOne):
    def step(self, optimizer):
        bad = self.anywhere(self.overflow(optimizer))
        self.unscale(optimizer)
        optimizer.step()
        if bad:
            self.lower()
        else:
            self.count()
        return not bad


class NeverLowers(RightOne):
    def lower(self):
        self.good = 0


class LowersForEachRank(RightOne):
    def anywhere(self, overflow):
        flag = torch.tensor(float(overflow))
        dist.all_reduce(flag)
        self.bad = int(flag)
        return bool(flag)

    def lower(self):
        self.scale = max(self.scale * self.backoff_factor**self.bad, self.min_scale)
        self.good = 0


class NoFloor(RightOne):
    def lower(self):
        self.scale *= self.backoff_factor
        self.good = 0


class CountGoesOn(RightOne):
    def lower(self):
        self.scale = max(self.scale * self.backoff_factor, self.min_scale)


class CountsSkippedSteps(RightOne):
    def lower(self):
        self.scale = max(self.scale * self.backoff_factor, self.min_scale)
        self.good += 1

    def count(self):
        self.good += 1
        if self.good >= self.growth_interval:
            self.scale *= self.growth_factor
            self.good = 0


class OneTooMany(RightOne):
    def count(self):
        self.good += 1
        if self.good > self.growth_interval:
            self.scale *= self.growth_factor
            self.good = 0


class GrowsAlways(RightOne):
    def count(self):
        self.scale *= self.growth_factor


class NeverGrows(RightOne):
    def count(self):
        pass


class KeepsTheCount(RightOne):
    def count(self):
        self.good += 1
        if self.good >= self.growth_interval:
            self.scale *= self.growth_factor


class DoublesAndHalves(RightOne):
    def lower(self):
        self.scale = max(self.scale / 2, self.min_scale)
        self.good = 0

    def count(self):
        self.good += 1
        if self.good == self.growth_interval:
            self.scale *= 2
            self.good = 0


class FallsByTheGrowthFactor(RightOne):
    def lower(self):
        self.scale = max(self.scale / self.growth_factor, self.min_scale)
        self.good = 0


class NeverUnscales(RightOne):
    def unscale(self, optimizer):
        pass


class UnscalesTwice(RightOne):
    def unscale(self, optimizer):
        super().unscale(optimizer)
        super().unscale(optimizer)


class CountsFirst(RightOne):
    """The scale has grown by the time it is divided by."""

    def step(self, optimizer):
        if self.anywhere(self.overflow(optimizer)):
            self.lower()
            return False
        self.count()
        self.unscale(optimizer)
        optimizer.step()
        return True


class ForgetsTheStep(RightOne):
    def step(self, optimizer):
        if self.anywhere(self.overflow(optimizer)):
            self.lower()
            return False
        self.unscale(optimizer)
        self.count()
        return True


class UnscalesTheFirstGroup(RightOne):
    def unscale(self, optimizer):
        for p in optimizer.param_groups[0]["params"]:
            p.grad /= self.scale


class ReturnsNothing(RightOne):
    def step(self, optimizer):
        super().step(optimizer)


class AsksOnlyAfterAnOverflow(RightOne):
    """The others never join."""

    def anywhere(self, overflow):
        return super().anywhere(True) if overflow else False


class TakesGradientsForGranted(RightOne):
    def gradients(self, optimizer):
        return [p.grad for group in optimizer.param_groups for p in group["params"]]


class SumsGradients(RightOne):
    """An infinity anywhere is one everywhere then."""

    def anywhere(self, overflow):
        return overflow

    def step(self, optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        return super().step(optimizer)


class ScalesBackward(RightOne):
    def scale_loss(self, loss):
        return float(loss) * self.scale


WRONG = [
    (LooksAtItsOwn, "local"),
    (LowersOnlyItsOwn, "scale_differs"),
    (LooksForNan, "only_nan"),
    (LooksForInfinity, "only_inf"),
    (FirstGroupOnly, "first_group"),
    (LooksAtTheLoss, "overflow_missed"),
    (NeverLooks, "never_skips"),
    (StepsAnyway, "steps_anyway"),
    (StepsAndSaysNo, "steps_anyway"),
    (NeverLowers, "never_backs_off"),
    (LowersForEachRank, "backs_off_per_rank"),
    (NoFloor, "no_floor"),
    (CountGoesOn, "not_reset"),
    (CountsSkippedSteps, "not_reset"),
    (OneTooMany, "grows_late"),
    (GrowsAlways, "grows_always"),
    (NeverGrows, "never_grows"),
    (KeepsTheCount, "count_kept"),
    (DoublesAndHalves, "fixed_factors"),
    (FallsByTheGrowthFactor, "factors_swapped"),
    (NeverUnscales, "not_unscaled"),
    (UnscalesTwice, "unscaled_twice"),
    (CountsFirst, "unscaled_late"),
    (ForgetsTheStep, "no_step"),
    (UnscalesTheFirstGroup, "first_group"),
    (ReturnsNothing, "returns_nothing"),
    (AsksOnlyAfterAnOverflow, "not_all_join"),
    (TakesGradientsForGranted, "none_gradient"),
    (SumsGradients, "gradients_sent"),
    (ScalesBackward, "not_a_loss"),
]


class WithAHook(RightOne):
    """Unscales first, as torch.amp does, and looks afterwards."""

    def step(self, optimizer):
        self.unscale(optimizer)
        bad = torch.zeros(1)
        for grad in self.gradients(optimizer):
            bad += (~grad.isfinite()).any()
        flags = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(flags, bad)
        if any(float(flag) for flag in flags):
            self.lower()
            return torch.tensor(False)
        optimizer.step()
        self.count()
        return torch.tensor(True)


class ByNorm:
    """The sum of squares is not finite exactly where a gradient is not; one sum over ranks."""

    def __init__(self, scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0):
        self.settings = growth_factor, backoff_factor, growth_interval, min_scale
        self.state = torch.tensor([scale, 0.0], dtype=torch.float64)

    @property
    def scale(self):
        return float(self.state[0])

    def scale_loss(self, loss):
        return loss * self.scale

    def step(self, optimizer):
        growth, backoff, interval, least = self.settings
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = sum((p.grad.double() / self.scale).pow(2).sum() for p in params)
        dist.all_reduce(total)
        good = bool(total.isfinite())
        if good:
            torch._foreach_mul_([p.grad for p in params], 1 / self.scale)
            optimizer.step()
            self.state[1] += 1
        scale, count = self.state.tolist()
        if not good:
            self.state = torch.tensor([max(scale * backoff, least), 0], dtype=torch.float64)
        elif count == interval:
            self.state = torch.tensor([scale * growth, 0], dtype=torch.float64)
        return good


class AsObjects(RightOne):
    def anywhere(self, overflow):
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, overflow)
        return any(said)


class MinOfFinite(RightOne):
    """An integer flag, the other way round."""

    def anywhere(self, overflow):
        flag = torch.tensor([0 if overflow else 1])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return flag.item() == 0


RIGHT = [RightOne, WithAHook, ByNorm, AsObjects, MinOfFinite]


class TorchsScaler(RightOne):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.inner = torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=self.growth_interval)

    def unscale(self, optimizer):
        super().unscale(optimizer)


class TorchsKernel(RightOne):
    def overflow(self, optimizer):
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(self.gradients(optimizer), found, torch.ones(1) / self.scale)
        return bool(found)

    def unscale(self, optimizer):
        pass


class GathersAllGradients(RightOne):
    """Every rank looks at everybody's gradients."""

    def overflow(self, optimizer):
        size = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        mine = torch.zeros(size)
        flat = torch.cat([grad.flatten() for grad in self.gradients(optimizer)])
        mine[: len(flat)] = flat
        everyone = [torch.empty(size) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return not all(bool(each.isfinite().all()) for each in everyone)

    def anywhere(self, overflow):
        return overflow


class ThroughTheStore(RightOne):
    def anywhere(self, overflow):
        self.rounds = getattr(self, "rounds", 0) + 1
        store, n = dist.distributed_c10d._get_default_store(), dist.get_world_size()
        store.set(f"labkit-{self.rounds}-{dist.get_rank()}", str(int(overflow)))
        return any(store.get(f"labkit-{self.rounds}-{rank}") == b"1" for rank in range(n))


class ThroughFiles(RightOne):
    def anywhere(self, overflow):
        self.rounds = getattr(self, "rounds", 0) + 1
        path = os.path.join(tempfile.gettempdir(), f"labkit-flag-{os.getppid()}-{{}}-{self.rounds}")
        pathlib.Path(path.format(dist.get_rank())).write_text(str(int(overflow)))
        dist.barrier()
        flags = [pathlib.Path(path.format(rank)).read_text() for rank in range(dist.get_world_size())]
        dist.barrier()
        os.remove(path.format(dist.get_rank()))
        return "1" in flags


class InAThread(RightOne):
    def anywhere(self, overflow):
        found = []
        worker = threading.Thread(target=lambda: found.append(RightOne.anywhere(self, overflow)))
        worker.start()
        worker.join()
        return found[0]


class ReadsTheCallersFrames(RightOne):
    def anywhere(self, overflow):
        frame = sys._getframe(1)
        while frame is not None:
            if "inputs" in frame.f_locals:
                break
            frame = frame.f_back
        return super().anywhere(overflow)


class PatchedJudge(RightOne):
    def step(self, optimizer):
        return True


def _patch_judge():
    from labkit.labs.lab03 import scaler

    scaler._sequences = lambda seen: None


PatchedJudge.notebook = _patch_judge

CHEATS = [
    (TorchsScaler, "ready_made"),
    (TorchsKernel, "ready_made"),
    (GathersAllGradients, "gradients_sent"),
    (ThroughTheStore, "store_used"),
    (ThroughFiles, "file_used"),
    (InAThread, ("thread_started", "record_differs")),
    (ReadsTheCallersFrames, "frame_read"),
    (PatchedJudge, "patched"),
]
