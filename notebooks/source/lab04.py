# %% [markdown]
# # 04 ZeRO
#
# **Every rank keeps the same optimizer state. Why?**
#
# About 90 minutes, after labs 02 and 03. No GPU: four real ranks train a small Llama, and every byte that they hold and send is recorded.

# %%
import json
import os
import shutil
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from IPython.display import Markdown

from labkit.check.check import mine_or
from labkit.cost import hardware
from labkit.cost.claims import communication, largest_saving
from labkit.labs import lab04
from labkit.labs.lab04 import engines, pictures, resumed
from labkit.model.llama import loss_of
from labkit.model.text import batches
from labkit.view import curves, plot, zero
from labkit.view.held import over_time

# %% [markdown]
# **Where this hour leads.** The same model, the same losses, on four ranks: torch's `DistributedDataParallel`, and torch's `FSDP2`, which is the last thing you will build. DDP's buckets (lab 02) have no bar: gradients are views of them here (`gradient_as_bucket_view=True`), by default copies: 4 bytes a parameter more.

# %%
ddp, fsdp = lab04.record("DDP", lab04.ddp_way), lab04.record("FSDP2", lab04.fsdp_way)
ax = zero.stacked(*pictures.bars([ddp, fsdp]), "bytes per parameter", "kept by each of 4 ranks, recorded; buffers at their largest")

# %% [markdown]
# ## 1 · One worker
# Ψ (psi) is the number of parameters. In fp32 a worker keeps 4Ψ bytes of parameters, 4Ψ of gradients and 8Ψ of AdamW's two moments.

# %%
serial = lab04.serial_losses(4, steps=6)
Markdown(f"**Serial baseline: {ddp.parameters / 1e6:.2f} million parameters; six steps of AdamW take the loss from {serial[0]:.4f} to {serial[-1]:.4f}.**")

# %% [markdown]
# ## 2 · Four replicas
# Under DDP all ranks have equal gradients, so their optimizers do equal things.
#
# **Question.** Of the bytes that four ranks keep for parameters, gradients and moments together, how many percent are a copy of what another rank has too?

# %%
copies_guess = labkit.predict("4.copies", ..., "%")  # your number in place of the dots


# %%
def train_replica():
    torch.manual_seed(0)
    model = resumed.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for tokens, targets in batches(3, 64, rank=dist.get_rank(), world_size=4, steps=3):
        loss_of(ddp(tokens.to(labkit.device())), targets.to(labkit.device())).backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    return torch.cat([each.flatten() for each in [*model.parameters(), *moments]]).detach().cpu()


first, *others = labkit.launch(train_replica, 4, prints="quiet")
same = [100 * (first == other).float().mean().item() for other in others]
copies_guess.reveal(100 * (1 - 1 / 4))
Markdown(f"**Ranks 1, 2 and 3 hold {min(same):.4g}% of rank 0's numbers again: with N ranks (N-1)/N of all state is copies, here {1 - 1 / 4:.0%}.**")

# %% [markdown]
# AdamW works element by element. So a rank can keep its N-th of the moments, update that, and get the rest from others: ZeRO stage 1.
#
# **Exercise 4.1: a share of the state** (15 min, core)
#
# `ZeroOptimizer(parameters, lr, betas, eps, weight_decay)` stands in AdamW's place; `step()` also averages gradients.
#
# - Trainable parameters are one flat tensor, zero-padded until N divides it; rank r owns part r.
# - In a step, gradients reach their owner by `reduce_scatter`, parameters all ranks by `all_gather`. A parameter whose `.grad` is None counts as zeros.
# - `self.shard` is your part in fp32: a view of fp32 parameters, a copy of bf16 ones. `self.inner` is torch's AdamW over it.
#
# <details><summary>Hint 1: a question</summary>
# If all parameters were views of one flat tensor, what would one all_gather into that tensor do?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>p.data = flat[a:b].view_as(p)</code>, <code>torch.nn.functional.pad</code>, <code>Tensor.chunk</code>, <code>dist.reduce_scatter(out, list)</code>, <code>dist.all_gather(list, part)</code>.
# </details>


# %% exercise="4.1"
class ZeroOptimizer:
    """AdamW whose state is shared out: call step() after backward, on all ranks."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        # SOLUTION
        self.parameters = [p for p in parameters if p.requires_grad]
        self.world_size = dist.get_world_size()

        def flatten(tensors):
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            return torch.nn.functional.pad(flat, (0, -len(flat) % self.world_size))

        self.flatten, self.flat = flatten, flatten([p.data for p in self.parameters])
        begin = 0
        for p in self.parameters:
            p.data = self.flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        self.part = self.flat.chunk(self.world_size)[dist.get_rank()]
        self.shard = self.part.float()  # in fp32 this is the part itself, in bf16 a copy
        self.inner = torch.optim.AdamW([self.shard], lr, betas, eps, weight_decay)
        # END SOLUTION

    def step(self):
        # SOLUTION
        grads = self.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        mine = torch.empty_like(self.part)
        dist.reduce_scatter(mine, list(grads.chunk(self.world_size)))
        self.shard.grad = mine.float() / self.world_size
        self.inner.step()
        self.shard.grad = None
        self.part.copy_(self.shard)
        dist.all_gather(list(self.flat.chunk(self.world_size)), self.part.clone())
        # END SOLUTION

    def zero_grad(self):
        # SOLUTION
        for p in self.parameters:
            p.grad = None
        # END SOLUTION


# %%
labkit.check("4.1")

# %% [markdown]
# **Question.** DDP all_reduces gradients: 2Ψ (N-1)/N elements a rank. How many times as much does stage 1 send? (Until an answer of yours is there, torch's own stands in, and what you see says *not yet yours*.)

# %%
sent_guess = labkit.predict("4.sent_1", ..., "times")

# %%
Mine1, note = mine_or(ZeroOptimizer, lab04.TorchZero, "torch's ZeroRedundancyOptimizer")
note = note and f" ({note})"
stage1 = lab04.record("stage 1", Mine1)
print(pictures.step_table([ddp, stage1], ranks=4))
sent_guess.reveal(communication(1) / communication(0))
state = stage1.states()["optimizer"] / stage1.parameters
off = max(abs(a - b) for a, b in zip(stage1.losses, serial, strict=False))
Markdown(f"**Moments: {state:.2f}Ψ bytes instead of 8Ψ, for {stage1.sent_elements / ddp.sent_elements:.2f} times DDP's traffic; losses within {off:.0e} of serial.**{note}")

# %% [markdown]
# An all_reduce *is* a reduce_scatter and an all_gather. Stage 1 only updates in between.
#
# Now take that all_gather away: each rank updates its part, and nobody tells the others. **What will you see?**


# %%
def forgetful(model):
    forward, finish, optimizer = lab04.recorded.way_of(Mine1)(model)

    def finish_alone():
        with lab04.recorded.untold():  # nothing is gathered
            finish()

    return forward, finish_alone, optimizer


broken = lab04.record("no all_gather", forgetful, steps=6)
ways = [("serial", serial), ("no all_gather", broken.losses)]
ax = curves.lines([(name, range(6), losses, "line") for name, losses in ways], "step", "loss", f"4.1 without its gathering{note}", from_zero=False)

# %% [markdown]
# No error, and the loss still falls: each rank trains a quarter of a model whose other quarters stay as they were. Only a comparison with other ranks, or a serial run, shows it.
#
# ## 3 · Gradients that do not stay
# The owner alone needs a gradient. Yet every rank keeps all 4Ψ bytes until its step.
#
# **Exercise 4.2: reduce at once** (12 min, core)
#
# `ZeroGradients` has the same methods. As backward makes a parameter's gradient, reduce it to its owners' parts and free `.grad`; several backwards before a step add up in the parts. Unlike 4.1, each parameter is padded and split by itself.
#
# <details><summary>Hint 1: a question</summary>
# Who calls you when a gradient is there, and what may that function do with <code>p.grad</code>?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>Tensor.register_post_accumulate_grad_hook</code>; AdamW takes a list of shards, and adds nothing up: <code>shard.grad</code> is yours to add to.
# </details>


# %% exercise="4.2"
class ZeroGradients:
    """As 4.1, and gradients are reduced to their owners' parts as they appear."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        # SOLUTION
        self.world_size = dist.get_world_size()

        def pad(tensor):
            return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % self.world_size))

        def reduce(p):
            mine = torch.empty_like(self.parts[p])
            dist.reduce_scatter(mine, list(pad(p.grad).chunk(self.world_size)))
            p.grad = None
            shard, mean = self.shards[p], mine.float() / self.world_size
            shard.grad = mean if shard.grad is None else shard.grad + mean

        self.flats = {p: pad(p.data) for p in parameters if p.requires_grad}
        self.parts, self.shards = {}, {}
        for p, flat in self.flats.items():
            p.data = flat[: p.numel()].view_as(p)
            self.parts[p] = flat.chunk(self.world_size)[dist.get_rank()]
            self.shards[p] = self.parts[p].float()
            p.register_post_accumulate_grad_hook(reduce)
        self.inner = torch.optim.AdamW(self.shards.values(), lr, betas, eps, weight_decay)
        # END SOLUTION

    def step(self):
        # SOLUTION
        self.inner.step()
        for p, part in self.parts.items():
            part.copy_(self.shards[p])
            dist.all_gather(list(self.flats[p].chunk(self.world_size)), part.clone())
        # END SOLUTION

    def zero_grad(self):
        # SOLUTION
        self.inner.zero_grad()
        # END SOLUTION


# %%
labkit.check("4.2")

# %% [markdown]
# **Question.** With four microbatches a step, how many times DDP's traffic (with `no_sync`) does stage 2 send?

# %%
four_guess = labkit.predict("4.sent_2", ..., "times")

# %%
Mine2, note_2 = mine_or(ZeroGradients, lab04.kept_way, "FSDP2, which keeps its part of the parameters beside the whole")
note_2 = note_2 and f" ({note_2})"
stage2, of_four = lab04.record("stage 2", Mine2), lab04.record("4 microbatches", Mine2, microbatches=4)
print(pictures.step_table([stage1, stage2, of_four], ranks=4))
four_guess.reveal(communication(2, 4) / communication(0, 4))
Markdown(f"**Gradients: {stage2.states()['gradients'] / stage2.parameters:.2f}Ψ bytes instead of 4Ψ. With four microbatches it sends {of_four.sent_elements / ddp.sent_elements:.2f} times as much as DDP; by formula {communication(2, 4) / communication(0, 4):.2f}.**{note_2}")

# %% [markdown]
# Each backward's gradients travel, k times Ψ, and parameters once: (k+1)Ψ. Stage 1 adds up first and stays at 2Ψ: with many microbatches it is the faster one.
#
# ## 4 · Parameters that come and go
# A layer needs its parameters while it computes, twice a step. In between an N-th will do.

# %% [markdown]
# **Exercise 4.3: gather, use, free** (25 min, hard)
#
# `ZeroParameters(module, lr, betas, eps, weight_decay)` is called in the module's place. Each sub-module that owns parameters is gathered before its forward and freed after it, and again in backward; gradients as in 4.2. Between steps a rank keeps parts alone, of parameters that do not train too, which AdamW never gets. Outputs are single tensors; no sub-modules share a parameter.
#
# <details><summary>Hint 1: a question</summary>
# Autograd keeps a parameter that backward needs. How can its bytes go while the tensor stays?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>register_forward_pre_hook</code>, <code>register_forward_hook</code>, <code>out.register_hook</code> (called when backward reaches this output), <code>p.untyped_storage().resize_(0)</code>.
# </details>
# <details><summary>Hint 3: the order</summary>
# Forward: gather before, free after. Backward: gather when it reaches the output; once a gradient is there, reduce it and free the parameter. Resized to <code>p.nbytes</code> and filled, a storage serves autograd again. Not every output requires a gradient.
# </details>


# %% exercise="4.3"
class ZeroParameters(torch.nn.Module):
    """A rank keeps its part of every parameter; the whole exists from before its use until after it."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        # SOLUTION
        super().__init__()
        self.module, n = module, dist.get_world_size()

        def pad(tensor):
            return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % n))

        def gather(owner, *_):
            for p in owner.parameters(recurse=False):
                full = p.new_empty(n * len(self.parts[p]))
                dist.all_gather(list(full.chunk(n)), self.parts[p])
                p.untyped_storage().resize_(p.nbytes)
                p.data.copy_(full[: p.numel()].view_as(p))

        def free(parameters):
            for p in parameters:
                p.untyped_storage().resize_(0)

        def after_forward(owner, args, out):
            free(owner.parameters(recurse=False))
            if out.requires_grad:
                out.register_hook(lambda grad: gather(owner))

        def reduce(p):
            mine = torch.empty_like(self.parts[p])
            dist.reduce_scatter(mine, list(pad(p.grad).chunk(n)))
            p.grad = None
            free([p])
            shard, mean = self.shards[p], mine.float() / n
            shard.grad = mean if shard.grad is None else shard.grad + mean

        self.parts = {p: pad(p.data).chunk(n)[dist.get_rank()].clone() for p in module.parameters()}
        self.shards = {p: part.float() for p, part in self.parts.items() if p.requires_grad}
        self.inner = torch.optim.AdamW(self.shards.values(), lr, betas, eps, weight_decay)
        for p in self.shards:
            p.register_post_accumulate_grad_hook(reduce)
        for owner in module.modules():
            if any(True for _ in owner.parameters(recurse=False)):
                owner.register_forward_pre_hook(gather)
                owner.register_forward_hook(after_forward)
        self.free = free
        free(self.parts)
        # END SOLUTION

    def forward(self, *args):
        # SOLUTION
        return self.module(*args)
        # END SOLUTION

    def step(self):
        # SOLUTION
        self.inner.step()
        for p, shard in self.shards.items():
            self.parts[p].copy_(shard)
        self.free(self.parts)  # what is frozen had no gradient to end its use in backward
        # END SOLUTION

    def zero_grad(self):
        # SOLUTION
        self.inner.zero_grad()
        # END SOLUTION


# %%
labkit.check("4.3")

# %% [markdown]
# **Question.** How many times DDP's traffic does stage 3 send?

# %%
three_guess = labkit.predict("4.sent_3", ..., "times")

# %%
Mine3, note_3 = mine_or(ZeroParameters, lab04.freed_way, "FSDP2")
note_3 = note_3 and f" ({note_3})"
stage3 = lab04.record("stage 3", Mine3)
yours = [ddp, stage1, stage2, stage3]
print(pictures.step_table([*yours, fsdp], ranks=4))
left, right = plot.side_by_side(2, width=5.2, height=2.8)
ax = zero.stacked(*pictures.bars(yours), "bytes per parameter", "kept by each of 4 ranks; buffers at their largest", ax=left)
ax = over_time(stage3.bytes_held(), f"stage 3, a step of rank 0{note_3}", ax=right)
plt.show()
three_guess.reveal(communication(3) / communication(0))
formula = [sum(pictures.by_formula(stage, 4).values()) for stage in range(4)]
Markdown(f"**{stage3.sent_elements / ddp.sent_elements:.2f} times the traffic, and {sum(stage3.states().values()) / stage3.parameters:.2f}Ψ bytes instead of {formula[0]:.0f}Ψ; by formula {', '.join(f'{each:g}' for each in formula)} at stages 0 to 3.**{note_3}")

# %% [markdown]
# Parameters travel twice, gradients once: 3Ψ. FSDP2 stays below, because it does not free its root (embedding, last norm, head) between forward and backward.
#
# Yellow (buffers) is what communication takes for a moment: 4.1 copies all gradients into one tensor, 4.2 and 4.3 go parameter by parameter. DDP's buckets are its gradients here. The teeth of the blue parameters on the right are gathered layers: little is kept, but the *peak* holds a layer whole, and its activations.

# %% [markdown]
# **The explorer.** When does a bucket weigh more than all states? At which number of ranks is stage 1 nearly as good as it gets? (Tab, then arrow keys. Buffers are one bucket, at every stage.)

# %%
zero.zero()

# %% [markdown]
# ## 5 · What is said of ZeRO
# "Stage 1 saves 4 times, stage 2 8 times, stage 3 N times, for 50% more communication", says an article that you may have read; "100B parameters at stage 1, 500B at stage 2", and that recomputation is part of stage 2.
#
# **Question.** Mixed precision (16 bytes a parameter), 8 GPUs: how many times does stage 1 save?

# %%
claim_guess = labkit.predict("4.claim", ..., "times")

# %%
table, saved = pictures.claims_table(ranks=8, device="H100"), pictures.saving(1, 8)
claim_guess.reveal(saved)
Markdown(f"{table}\n\n**{saved:.2f} times with 8 GPUs; {largest_saving(1):g} only with ever more. In fp32 stage 1 never saves more than {largest_saving(1, 'fp32'):g} times.**")

# %% [markdown]
# The ZeRO paper's own Table 1, computed: model states on each device, mixed precision.

# %%
print(pictures.table_1())

# %% [markdown]
# ## 6 · One norm for all
# Clipping wants the norm of the *whole* gradient, of which a rank now has a part. Shards [3, 4] and [12, 0]: what is the norm, and what would rank 0 alone say?
#
# **Exercise 4.4: clip under sharding** (5 min, easy)
#
# `shards`: this rank's gradient shards. If the norm of all shards of all ranks exceeds `max_norm`, scale in place by one factor; below it, leave every bit alone. Return the norm before clipping, a float. Only one number may travel. Shards may be fp16; all may be zero; an infinite norm is returned as it is.
#
# <details><summary>Hint 1: a question</summary>
# Norms do not add up. What does?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>shard.float().pow(2).sum()</code>, <code>dist.all_reduce</code>, <code>Tensor.mul_</code>.
# </details>


# %% exercise="4.4"
def clip_grad_norm(shards: list, max_norm: float) -> float:
    """Scale this rank's shards so that the norm over all ranks is at most max_norm; returns the norm before."""
    # SOLUTION
    total = sum(shard.float().pow(2).sum() for shard in shards)
    dist.all_reduce(total)
    norm = total.sqrt().item()
    if norm > max_norm:
        for shard in shards:
            shard.mul_(max_norm / norm)
    return norm
    # END SOLUTION


# %%
labkit.check("4.4")


# %%
def clip_one(numbers):
    shard = torch.tensor(numbers, device=labkit.device())
    alone = shard.norm().item()
    return alone, clip([shard], 1.0), shard.norm().item()


clip, note_4 = mine_or(clip_grad_norm, lab04.torchs_clip, "torch's clip_grad_norm_")
note_4 = note_4 and f" ({note_4})"
(alone, norm, now), (other, _, then) = labkit.launch(clip_one, 2, rank_args=[([3.0, 4.0],), ([12.0, 0.0],)], prints="quiet")
Markdown(f"**The norm is {norm:g}, not {alone:g} or {other:g}; afterwards the shards' norms are {now:.3f} and {then:.3f}, together {(now**2 + then**2) ** 0.5:.3f}.**{note_4}")

# %% [markdown]
# ## 7 · When a rank dies
# Each rank has and saves a part. Jobs die in mid-save, and come back on other numbers of ranks.
#
# **Exercise 4.5: whole after a crash** (15 min, core)
#
# - `save(step, shards, sizes)`: by name, this rank's parts of flat tensors, zero-padded, and true lengths. Each rank writes its own bytes, once; no shard travels; a failed write raises.
# - `load()` gives `(step, shards)` of the newest *whole* checkpoint, cut for this number of ranks; FileNotFoundError where there is none.
# - A step may be saved again; the newer save counts. Whenever ranks die, the save before or the new one loads; leftovers never do. The folder may move.
#
# <details><summary>Hint 1: a question</summary>
# Which action on a disk happens whole or not at all? Who may do it, and when?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>os.replace</code>, <code>dist.barrier</code>; <code>torch.save</code> writes a view's whole storage, so <code>clone()</code>.
# </details>


# %% exercise="4.5"
class ShardedCheckpoint:
    """Checkpoints in a folder, a part by each rank; they load on any number of ranks."""

    def __init__(self, folder):
        # SOLUTION
        self.folder = Path(folder)
        # END SOLUTION

    def save(self, step: int, shards: dict[str, torch.Tensor], sizes: dict[str, int]):
        # SOLUTION
        rank, new = dist.get_rank(), self.folder / "new"
        if rank == 0:
            shutil.rmtree(new, ignore_errors=True)  # left by a killed save
            new.mkdir(parents=True)
        dist.barrier()
        torch.save({name: shard.clone() for name, shard in shards.items()}, new / f"{rank}.pt")
        dist.barrier()  # all parts are there
        if rank == 0:
            (new / "sizes.json").write_text(json.dumps(sizes))
            number = 1 + max((number for _, number in self.whole()), default=0)  # a name of its own
            os.replace(new, self.folder / f"step-{step}-{number}")  # whole, or not at all
        dist.barrier()
        # END SOLUTION

    def load(self) -> tuple[int, dict[str, torch.Tensor]]:
        # SOLUTION
        if not self.whole():
            raise FileNotFoundError(f"no checkpoint in {self.folder}")
        step, number = max(self.whole())
        rank, n, newest = dist.get_rank(), dist.get_world_size(), self.folder / f"step-{step}-{number}"
        parts = [torch.load(newest / f"{number}.pt") for number in range(len(list(newest.glob("*.pt"))))]
        found = {}
        for name, size in json.loads((newest / "sizes.json").read_text()).items():
            whole = torch.cat([part[name] for part in parts])[:size]
            whole = torch.nn.functional.pad(whole, (0, -size % n))
            found[name] = whole.chunk(n)[rank].clone()
        return step, found

    def whole(self):
        return [tuple(map(int, path.name.split("-")[1:])) for path in self.folder.glob("step-*-*")]
        # END SOLUTION


# %%
labkit.check("4.5")

# %% [markdown]
# Your optimizer and your checkpoint: saved on 4 ranks at steps 4 and 8, but in the second save the kernel ends rank 2 in mid-write, by a limit on the size of its files (signal SIGXFSZ). Then on 2 ranks, then on 3.


# %%
def train_on(folder, until, fatal=None):
    model, checkpoint = resumed.model(), Checkpoint(folder)
    done, optimizer = resumed.begin(Mine1, checkpoint, model)
    n, losses, psi = dist.get_world_size(), {}, sum(p.numel() for p in model.parameters())
    for step, (tokens, targets) in enumerate(batches(12 // n, 64, 0, dist.get_rank(), n, steps=until), 1):
        if step > done:
            loss = loss_of(model(tokens.to(labkit.device())), targets.to(labkit.device()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
        if step > done and step % 4 == 0:
            if step == fatal and dist.get_rank() == 2:
                resumed.die_in_mid_write(psi // 2)  # bytes: a file of one part alone has Ψ
            shards = resumed.state_of(optimizer)
            checkpoint.save(step, shards, dict.fromkeys(shards, psi))
    return losses


Checkpoint, note_5 = mine_or(ShardedCheckpoint, lab04.TorchCheckpoint, "torch's")
note_5 = note_5 and f" ({note_5})"
folder = tempfile.mkdtemp()
try:
    labkit.launch(train_on, 4, folder, 8, 8, prints="quiet")
except labkit.RankFailed as failure:
    print(failure)
on_two, on_three = (labkit.launch(train_on, n, folder, until, prints="quiet") for n, until in ((2, 8), (3, 12)))

# %%
true, found = resumed.by_one(12), {}
for ranks in (on_two, on_three):
    found |= {step: sum(losses[step] for losses in ranks) / len(ranks) for step in ranks[0]}
series = [("serial, never interrupted", range(1, 13), true, "line"), ("resumed", [*found], [*found.values()], "points")]
ax = curves.lines(series, "step", "loss", f"saved on 4, resumed on 2 from step 4, on 3 from step 8{note_5}", from_zero=False)
plt.show()
off = max(abs(loss - true[step - 1]) for step, loss in found.items())
files = sorted(os.path.relpath(path, folder) for path in Path(folder).rglob("*") if path.is_file())
shutil.rmtree(folder)
Markdown(f"**The kill lost steps 5 to 8, nothing else; the losses go on within {off:.0e} of a run that was never interrupted.** Left in the folder: {', '.join(files[:6])} ...")

# %% [markdown]
# torch has this as `torch.distributed.checkpoint` (`dcp.save`, `dcp.load`): each rank writes its part, `.metadata` comes last, and loading cuts anew. DeepSpeed writes `global_step8/*_optim_states.pt`, a part per rank, then the file `latest`; its `zero_to_fp32.py` makes one fp32 state from the parts, without GPUs:
#
# ```
# python zero_to_fp32.py checkpoint_folder output_folder
# ```
#
# At stage 3 `model.state_dict()` holds empty tensors: save through the engine, with `stage3_gather_16bit_weights_on_model_save`.

# %% [markdown]
# ## 8 · DeepSpeed
# Stages 0 to 3 on the same model and rows, on two ranks; then stage 2 with the bucket that you get by default: 500 million elements.
#
# **Question.** How many MB does a rank hold for buckets then?

# %%
bucket_guess = labkit.predict("4.bucket", ..., "MB")

# %%
every = {f"stage {stage}": engines.config(stage) for stage in range(4)}
every["stage 2, default bucket"] = engines.config(2, reduce_bucket_size=engines.DEFAULT_BUCKET)
deepspeeds = engines.record(every)
*staged, default = deepspeeds.values()
print(pictures.step_table(staged, ranks=2))
ax = zero.stacked(*pictures.bars(staged), "bytes per parameter", f"DeepSpeed, 2 ranks, buckets of {engines.BUCKET:,} elements")
plt.show()
bucket_guess.reveal(default.most("buffers") / 1e6)
two = lab04.serial_losses(2)
off = max(abs(a - b) for step in staged for a, b in zip(step.losses, two, strict=True))
Markdown(f"**All stages within {off:.0e} of serial. With the default bucket {default.most('buffers') / default.parameters:.0f} bytes a parameter: that is why ZeRO-2 can need more memory than DDP on a small model.**")

# %% [markdown]
# Three surprises. In fp32 DeepSpeed keeps a *master copy* all the same: 12Ψ/N, not 8Ψ/N. And over gloo its stages 1 and 2 all_reduce gradients, then all_gather parameters: 3Ψ, where yours send 2Ψ. (`use_multi_rank_bucket_allreduce: false` makes it one `reduce` to each owner.) At stage 3 it reduce_scatters. And when backward ends, stage 1 too keeps its own part of the gradients alone.
#
# Now stage 2's switches, one at a time, replayed on GPUs:

# %%
names = ("smaller buckets", "overlap_comm", "no contiguous_gradients", "a reduce to each owner")
switches = {name: engines.SWITCHES[name] for name in names}
print(switches)
switched = {"as above": deepspeeds["stage 2"]} | engines.record({k: engines.config(2, **each) for k, each in switches.items()})
print(pictures.switches_table(switched, hardware.cluster("T4", per_node=2)))

# %% [markdown]
# `overlap_comm` takes a second bucket, and pays with CUDA streams: a CPU's record has none, so exposed time says nothing about it here. `contiguous_gradients` copies gradients into one buffer, against a GPU's fragments, which this record cannot see. Bucket size shows in both columns.

# %% [markdown]
# ## 9 · Across nodes
# Stage 3 gathers over the slow network too. *Hybrid sharding* (HSDP) shards within a node and keeps replicas between; *ZeRO++* sends narrower numbers, and keeps a second copy within the node for backward.

# %%
ways = pictures.spreads(nodes=2, per_node=8)
left, right = plot.side_by_side(2, width=5.4, height=2.8)
kept = {kind: [way.kept[kind] for way in ways] for kind in pictures.PARTS}
ax = zero.stacked([way.name for way in ways], kept, "bytes per parameter", "kept by a GPU, bf16, 2 nodes of 8", ax=left)
ax = curves.bars([("", [way.leaving for way in ways])], [way.name for way in ways], "bytes per parameter", "leave a node in a step", ax=right)
plt.show()
by_name = {way.name: way.leaving for way in ways}
Markdown(f"**Per parameter {by_name['ZeRO-3']:.3g} bytes leave a node with stage 3, {by_name['HSDP']:.3g} with HSDP, {by_name['ZeRO++']:.3g} with ZeRO++.**")

# %% [markdown]
# On a cluster, `ds_config.json` holds what `engines.config(2)` is above, with `"bf16": {"enabled": true}` and `"gradient_clipping": 1.0`; batch sizes must agree (lab 02).
#
# ```
# deepspeed --num_gpus 8 train.py --deepspeed_config ds_config.json
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 train.py
# ```

# %% [markdown]
# | you wrote | torch and DeepSpeed have | remember |
# |---|---|---|
# | `ZeroOptimizer` | `ZeroRedundancyOptimizer`; stage 1 | update an N-th, gather the rest: 2Ψ, as DDP |
# | `ZeroGradients` | FSDP2 with `reshard_after_forward=False`; stage 2 | (k+1)Ψ with k microbatches |
# | `ZeroParameters` | `fully_shard`; stage 3 | 3Ψ, and a layer is whole for a moment |
# | `clip_grad_norm` | `clip_grad_norm_` on DTensors; `gradient_clipping` | squares add up, norms do not |
# | `ShardedCheckpoint` | `torch.distributed.checkpoint`; `zero_to_fp32.py` | one atomic action, after all are done |
#
# **An open question.** At stage 3 a GPU's part of the moments waits for the step, once. A server has ten times as much memory beside its GPUs. What would it cost to keep the moments there? Lab 05 computes it.
