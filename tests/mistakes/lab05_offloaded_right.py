"""Right answers to exercise 5.1, `OffloadedAdam`, written differently.

Most answers, wrong ones too, are built on `HostAdam`, so that each shows what is its own.
"""

import torch

HOST = torch.device("cpu")


class HostAdam:
    """In each parameter's hook: gradient to the host, AdamW there, the new weight back."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.parameters = list(parameters)
        self.state = {}
        for p in self.chosen():
            self.state[p] = self.make(p)
            p.register_post_accumulate_grad_hook(self.hook)

    def chosen(self):
        return [p for p in self.parameters if p.requires_grad]

    def make(self, p):
        master = p.detach().to(HOST, torch.float32, copy=True)
        return {"w": master, "m": torch.zeros_like(master), "v": torch.zeros_like(master), "t": 0}

    def hook(self, p):
        self.update(p)

    @torch.no_grad()
    def update(self, p):
        grad = self.take(p)
        self.adam(self.state[p], grad)
        self.put(p)

    def take(self, p):
        grad = p.grad.to(HOST).float()
        p.grad = None
        return grad

    def adam(self, s, g):
        (b1, b2), s["t"] = self.betas, s["t"] + 1
        s["m"].mul_(b1).add_(g, alpha=1 - b1)
        s["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
        s["w"].mul_(1 - self.lr * self.weight_decay)
        root = (s["v"] / (1 - b2 ** s["t"])).sqrt_().add_(self.eps)
        s["w"].addcdiv_(s["m"] / (1 - b1 ** s["t"]), root, value=-self.lr)

    def put(self, p):
        p.copy_(self.state[p]["w"])

    def step(self):
        pass

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class TorchsOwnOnTheHost:
    """One torch.optim.AdamW for each parameter, on its master."""

    def __init__(self, parameters, **options):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters, self.inner = {}, {}
        for p in self.parameters:
            self.masters[p] = torch.nn.Parameter(p.detach().to("cpu", torch.float32, copy=True))
            self.inner[p] = torch.optim.AdamW([self.masters[p]], **options)
            p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        self.masters[p].grad = p.grad.cpu().float()
        p.grad = None
        self.inner[p].step()
        self.masters[p].grad = None
        p.data.copy_(self.masters[p].data)

    def step(self):
        pass

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class OneBehind(HostAdam):
    """A gradient starts on its way, and the one before it is used meanwhile; the last one when backward ends."""

    def __init__(self, *args, **kwargs):
        self.waiting = None
        super().__init__(*args, **kwargs)

    def hook(self, p):
        grad = p.grad.to(HOST, non_blocking=True)
        p.grad = None
        if self.waiting is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self.finish()
        self.waiting = (p, grad)

    @torch.no_grad()
    def finish(self):
        if self.waiting is not None:
            p, grad = self.waiting
            self.adam(self.state[p], grad.float())
            self.put(p)
            self.waiting = None


class IntoABuffer(HostAdam):
    """The gradient is copied into a host tensor that is there already; the weight comes back from one in its dtype."""

    def make(self, p):
        room = torch.empty(p.shape, dtype=p.dtype, device=HOST)
        return super().make(p) | {"room": room}

    def take(self, p):
        self.state[p]["room"].copy_(p.grad, non_blocking=True)
        p.grad = None
        return self.state[p]["room"].float()

    def put(self, p):
        p.copy_(self.state[p]["room"].copy_(self.state[p]["w"]))


class LetsZeroGradDoIt(HostAdam):
    """Flat state on the host, a count for each parameter in a tensor."""

    def make(self, p):
        master = p.detach().cpu().float().flatten()
        flat = torch.zeros(2, master.numel())
        return {"w": master.clone(), "m": flat[0], "v": flat[1], "t": 0}

    def take(self, p):
        return super().take(p).flatten()

    def put(self, p):
        p.data.copy_(self.state[p]["w"].view(p.shape))


class ByAFunctionOfTorch(HostAdam):
    """torch.optim's functional AdamW on the host's tensors."""

    def adam(self, s, g):
        from torch.optim.adamw import adamw

        steps = s.setdefault("steps", torch.zeros(()))
        adamw(
            [s["w"]], [g], [s["m"]], [s["v"]], [], [steps], foreach=False, amsgrad=False, beta1=self.betas[0],
            beta2=self.betas[1], lr=self.lr, weight_decay=self.weight_decay, eps=self.eps, maximize=False,
        )  # fmt: skip


class AssignsData(HostAdam):
    """A new tensor of the device takes the old weight's place."""

    def put(self, p):
        p.data = self.state[p]["w"].to(p.dtype).to(p.device)


RIGHT = [HostAdam, AssignsData, TorchsOwnOnTheHost, OneBehind, IntoABuffer, LetsZeroGradDoIt, ByAFunctionOfTorch]
