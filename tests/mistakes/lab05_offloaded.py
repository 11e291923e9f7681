"""Wrong answers to exercise 5.1, `OffloadedAdam`, with the cause each must be told.

What is judged, and in which order, stands in `labkit.labs.lab05.offloaded`; right ones in `lab05_offloaded_right`.
"""

import lab05_offloaded_right
import torch

HostAdam = lab05_offloaded_right.HostAdam
HOST = lab05_offloaded_right.HOST


class OffloadedAdam:
    """Untouched."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        raise NotImplementedError("OffloadedAdam is still a stub")

    def step(self):
        return NotImplemented

    def zero_grad(self):
        return NotImplemented


class StepIsOpen(HostAdam):
    def hook(self, p):
        self.update(p)

    def step(self):
        return NotImplemented


class NoStep:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.inner = HostAdam(parameters, lr, betas, eps, weight_decay)

    def zero_grad(self):
        self.inner.zero_grad()


class TakesNoBetas(HostAdam):
    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, lr)


class InStep(HostAdam):
    """The whole optimizer after backward, as always; only its state is on the host."""

    def hook(self, p):
        pass

    def step(self):
        for p in self.state:
            if p.grad is not None:
                self.update(p)


class UpdatesInStep(HostAdam):
    """Gradients leave during backward, the update waits."""

    def __init__(self, *args, **kwargs):
        self.came = {}
        super().__init__(*args, **kwargs)

    def hook(self, p):
        self.came[p] = HostAdam.take(self, p)

    def take(self, p):
        return self.came.pop(p)

    def step(self):
        for p in list(self.came):
            self.update(p)


class StateBesideTheWeights(HostAdam):
    """zeros_like(p) lies where p lies."""

    def make(self, p):
        return {"w": p, "m": torch.zeros_like(p.detach()), "v": torch.zeros_like(p.detach()), "t": 0}

    def take(self, p):
        grad, p.grad = p.grad, None
        return grad

    def put(self, p):
        pass


class TorchsOwnOnTheDevice:
    """torch.optim.AdamW where the parameters are."""

    def __init__(self, parameters, **options):
        self.inner = torch.optim.AdamW(list(parameters), **options)

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


class StateTravels(HostAdam):
    """Kept on the host, brought to the device for the update."""

    @torch.no_grad()
    def update(self, p):
        s = self.state[p]
        on_device = {key: value if key == "t" else value.to(p.device) for key, value in s.items()}
        self.adam(on_device, p.grad.float())
        p.copy_(on_device["w"])
        p.grad = None
        self.state[p] = {key: value if key == "t" else value.to(HOST) for key, value in on_device.items()}


class KeepsGradients(HostAdam):
    def take(self, p):
        return p.grad.to(HOST).float()


class StashesGradientsOnTheDevice(HostAdam):
    def __init__(self, *args, **kwargs):
        self.stash = []
        super().__init__(*args, **kwargs)

    def take(self, p):
        self.stash.append(p.grad)
        return super().take(p)

    def zero_grad(self):
        self.stash.clear()


class NeverLetsGo(HostAdam):
    def take(self, p):
        return p.grad.to(HOST).float()

    def zero_grad(self):
        for p in self.parameters:
            if p.grad is not None:
                p.grad.zero_()


class WideGradients(HostAdam):
    def take(self, p):
        grad, p.grad = p.grad.to(HOST, torch.float32), None
        return grad


class WideWeights(HostAdam):
    def put(self, p):
        p.copy_(self.state[p]["w"].to(p.device).to(p.dtype))


class ReadsTheWeightEachTime(HostAdam):
    """No master: the weight is fetched from the device."""

    def make(self, p):
        master = torch.zeros(p.shape)
        return {"w": master, "m": torch.zeros_like(master), "v": torch.zeros_like(master), "t": 0}

    def take(self, p):
        self.state[p]["w"] = p.detach().to(HOST).float()
        return super().take(p)


class MasterInTheModelsDtype(HostAdam):
    def make(self, p):
        return super().make(p) | {"w": p.detach().to(HOST, copy=True)}

    def take(self, p):
        return super().take(p)

    def adam(self, s, g):
        wide = s | {"w": s["w"].float()}
        super().adam(wide, g)
        s["t"] = wide["t"]
        s["w"].copy_(wide["w"])


class NarrowMoments(HostAdam):
    def make(self, p):
        s = super().make(p)
        return s | {"m": s["m"].to(p.dtype), "v": s["v"].to(p.dtype)}

    def adam(self, s, g):
        wide = {key: value if key == "t" else value.float() for key, value in s.items()}
        super().adam(wide, g)
        s["t"] = wide["t"]
        for key in ("w", "m", "v"):
            s[key].copy_(wide[key])


class NeverWritesBack(HostAdam):
    def put(self, p):
        pass


class WritesBackInTheNextStep(HostAdam):
    def take(self, p):
        p.copy_(self.state[p]["w"])
        return super().take(p)

    def put(self, p):
        pass


class NoBiasCorrection(HostAdam):
    def adam(self, s, g):
        b1, b2 = self.betas
        s["m"].mul_(b1).add_(g, alpha=1 - b1)
        s["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
        s["w"].mul_(1 - self.lr * self.weight_decay).addcdiv_(s["m"], s["v"].sqrt() + self.eps, value=-self.lr)


class CoupledDecay(HostAdam):
    def adam(self, s, g):
        decay, self.weight_decay = self.weight_decay, 0.0
        super().adam(s, g + decay * s["w"])
        self.weight_decay = decay


class EpsUnderTheRoot(HostAdam):
    def adam(self, s, g):
        (b1, b2), s["t"] = self.betas, s["t"] + 1
        s["m"].mul_(b1).add_(g, alpha=1 - b1)
        s["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
        s["w"].mul_(1 - self.lr * self.weight_decay)
        root = (s["v"] / (1 - b2 ** s["t"]) + self.eps).sqrt()
        s["w"].addcdiv_(s["m"] / (1 - b1 ** s["t"]), root, value=-self.lr)


class CountsHooks(HostAdam):
    """One count of steps, which each hook raises."""

    count = 0

    def adam(self, s, g):
        s["t"] = self.count
        self.count += 1
        super().adam(s, g)


class NeverCounts(HostAdam):
    def adam(self, s, g):
        s["t"] = 0
        super().adam(s, g)


class BetasSwapped(HostAdam):
    def adam(self, s, g):
        self.betas = self.betas[::-1]
        super().adam(s, g)
        self.betas = self.betas[::-1]


class HooksEveryParameter(HostAdam):
    def chosen(self):
        return self.parameters


class CountsStepsForAll(HostAdam):
    """A parameter that took no part has grown older all the same."""

    steps = 0

    def adam(self, s, g):
        s["t"] = self.steps
        super().adam(s, g)

    def step(self):
        self.steps += 1


class MixesDevices(HostAdam):
    def take(self, p):
        grad, p.grad = p.grad, None
        return grad


class AssignsWideWeights(HostAdam):
    def put(self, p):
        p.data = self.state[p]["w"].to(p.device).to(p.dtype)


class LastOnesInStep(HostAdam):
    """Gradients leave in the hook; updates are two behind."""

    def __init__(self, *args, **kwargs):
        self.waiting = []
        super().__init__(*args, **kwargs)

    def hook(self, p):
        self.waiting.append((p, self.take(p)))
        if len(self.waiting) > 2:
            self.finish()

    @torch.no_grad()
    def finish(self):
        p, grad = self.waiting.pop(0)
        self.adam(self.state[p], grad)
        self.put(p)

    def step(self):
        while self.waiting:
            self.finish()


class OneBehindInStep(LastOnesInStep):
    """A gradient stays where it is until the next one appears; the last of all until step()."""

    def hook(self, p):
        if self.waiting:
            self.finish()
        self.waiting.append(p)

    @torch.no_grad()
    def finish(self):
        self.update(self.waiting.pop())


WRONG = [
    (AssignsWideWeights, "up_wide"),
    (LastOnesInStep, "left_for_step"),
    (OneBehindInStep, "left_for_step"),
    (OffloadedAdam, "not_attempted"),
    (StepIsOpen, "half_attempted"),
    (NoStep, "method_missing"),
    (TakesNoBetas, "wrong_signature"),
    (InStep, "after_backward"),
    (UpdatesInStep, "update_after_backward"),
    (StateBesideTheWeights, "state_on_device"),
    (TorchsOwnOnTheDevice, "state_on_device"),
    (StateTravels, "state_travels"),
    (KeepsGradients, "gradients_kept"),
    (StashesGradientsOnTheDevice, "gradients_kept"),
    (NeverLetsGo, "gradients_held"),
    (WideGradients, "down_wide"),
    (WideWeights, "up_wide"),
    (ReadsTheWeightEachTime, ("master_lost", "down_twice")),
    (MasterInTheModelsDtype, "master_lost"),
    (NarrowMoments, ("state_narrow", "moments_narrow")),
    (NeverWritesBack, "never_updated"),
    (WritesBackInTheNextStep, "late"),
    (NoBiasCorrection, "no_bias_correction"),
    (CoupledDecay, "coupled_decay"),
    (EpsUnderTheRoot, "eps_inside"),
    (CountsHooks, "shared_count"),
    (NeverCounts, "always_first_step"),
    (BetasSwapped, "betas_swapped"),
    (HooksEveryParameter, "frozen_parameter"),
    (CountsStepsForAll, "unused_parameter"),
    (MixesDevices, "mixed_devices"),
]
