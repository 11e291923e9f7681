# %% [markdown]
# # 02 Data parallel
#
# **Four workers, one model: what must they agree on, and when?**
#
# About 60 minutes, after lab 01. No GPU: four real ranks train a small Llama on real text; their record is replayed on GPUs that you do not own.

# %%
from statistics import mean, median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from IPython.display import Markdown

from labkit.check.check import mine_or
from labkit.cost import comm, hardware, laptop
from labkit.labs import lab02
from labkit.labs.lab02.scaling import train_on
from labkit.model.llama import Llama, Shape, loss_of
from labkit.model.text import batches
from labkit.record.laptop import laptop as this_laptop
from labkit.record.prices import prices
from labkit.record.replay import replay
from labkit.view import buckets, curves, live, plot

# %% [markdown]
# **Where this hour leads.** One training step, recorded on four ranks of this machine with torch's `DistributedDataParallel`, and played again on four T4 GPUs.

# %%
t4s = hardware.cluster("T4", per_node=4)
torchs_way = lambda model: lab02.TorchDDP(model, 2**21), lambda wrapped: wrapped.finish()
with_torch = lab02.record_step(*torchs_way)
played = replay(with_torch.records, prices(t4s))
ax = plot.timeline(lab02.lanes(with_torch, played, "rank 0"), "DistributedDataParallel, replayed on 4 T4 over PCIe 3")

# %% [markdown]
# The network works while backward still goes on. You will build that.
#
# ## 1 · One worker
# The loop is the same on one rank and on four. Each rank takes its own rows of a batch; together they are the batch of one worker.


# %%
def train(steps, rows, average=None):
    rank, n, device = dist.get_rank(), dist.get_world_size(), labkit.device()
    torch.manual_seed(0)  # every rank starts from the same weights
    model = Llama(Shape()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, weights = [], []
    for tokens, targets in batches(rows, 64, rank=rank, world_size=n, steps=steps):
        loss = loss_of(model(tokens.to(device)), targets.to(device))
        loss.backward()
        if average is not None:
            average(model)
        optimizer.step()
        optimizer.zero_grad()
        labkit.report(step=len(losses), loss=loss.item())
        losses.append(loss.item())
        if len(losses) % 5 == 0:
            weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu())
    return losses, torch.stack(weights)


STEPS = 30
serial, _ = labkit.launch(train, 1, STEPS, 16, prints="quiet")[0]
Markdown(f"**Serial baseline: 16 rows a step, the loss falls from {serial[0]:.3f} to {serial[-1]:.3f} nats per byte.**")

# %% [markdown]
# ## 2 · Four workers that never talk
# Same start, same optimizer, 4 rows each.
#
# **Question.** After 30 steps: how far apart are the weights of two ranks? All weights are one long vector; take the norm of the difference, in percent of the norm of one.

# %%
apart_guess = labkit.predict("2.apart", ..., "%")  # your number in place of the dots

# %%
alone = labkit.launch(train, 4, STEPS, 4, prints="quiet")
one, other = alone[0][1], alone[1][1]
apart = [0, *(100 * (one - other).norm(dim=1) / one.norm(dim=1)).tolist()]
left, right = plot.side_by_side(2, width=4.2, height=2.8)
series = [(f"rank {r}", range(STEPS), losses, "line") for r, (losses, _) in enumerate(alone)]
ax = curves.lines(series, "step", "loss", "without averaging: each loss falls", left, from_zero=False)
ax = curves.lines([("", range(0, STEPS + 1, 5), apart, "line")], "steps done", "%", "all weights of ranks 0 and 1, apart", ax=right)
plt.show()
apart_guess.reveal(apart[-1])
Markdown(f"**Four runs that look healthy, four different models: ranks 0 and 1 are {apart[-1]:.0f}% apart.**")

# %% [markdown]
# No error, no odd loss; each rank just learned from a quarter of the data. The gradient of the whole batch is the mean of the four. Average it before each step, and equal weights stay equal: no weight need ever travel.
#
# **Exercise 2.1: one model from four** (6 min, easy)
#
# Called after backward. Every parameter's `.grad` becomes its mean over all ranks. One `all_reduce` a parameter will do. Where a parameter took no part on this rank (`.grad` is None) but on another, it counts as zero here; one that took part nowhere may keep None. Leave frozen parameters alone.
#
# <details><summary>Hint 1: a question</summary>
# If one rank skips a parameter whose <code>.grad</code> is None, which gradient will the others add theirs to?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>dist.all_reduce</code>, <code>torch.zeros_like</code>, <code>parameter.requires_grad</code>.
# </details>


# %% exercise="2.1"
def average_gradients(model: torch.nn.Module) -> None:
    """After backward: every parameter's `.grad` becomes its mean over ranks."""
    # SOLUTION
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    # END SOLUTION


# %%
labkit.check("2.1")

# %% [markdown]
# Four ranks again, now with your function. Watch the curve while they train.

# %%
average, note = mine_or(average_gradients, lab02.torchs_average, "torch's")
print(note or "yours")
note = note and f" ({note})"
with live.losses(reference=serial) as watch:
    found = labkit.launch(train, 4, STEPS, 4, average, on_report=watch)
means = [mean(at_step) for at_step in zip(*(losses for losses, _ in found), strict=True)]
off = max(abs(a - b) for a, b in zip(means, serial, strict=True))
Markdown(f"**Four workers, one model: the mean of their losses is the serial loss to {off:.0e}, at every step.**{note}")

# %% [markdown]
# Thin lines: each rank's loss on its own rows. What they agree on is the gradient, once a step. They never compare weights.
#
# ## 3 · What it costs
# A larger Llama: 3 million parameters, 12 MB of gradients. One step is recorded on four ranks and replayed on four T4s, where computing is quick and waiting shows.
#
# **Question.** All of it after backward this time, nothing overlaps: for how many percent of the step does a GPU stand still? (The first timeline has the lengths.)

# %%
naive_guess = labkit.predict("2.naive_exposed", ..., "%")

# %%
naive = lab02.record_step(lambda model: model, average)
played = replay(naive.records, prices(t4s))
ax = plot.timeline(lab02.lanes(naive, played, "rank 0"), f"all_reduce after backward, 4 T4 over PCIe 3{note}")
plt.show()
naive_exposed_s = played.exposed_s(0)
naive_guess.reveal(100 * naive_exposed_s / played.time_s)
Markdown(f"**Exposed: {naive_exposed_s * 1e3:.2f} of {played.time_s * 1e3:.2f} ms, for {naive.num_bytes / 1e6:.1f} MB of gradients.**")

# %% [markdown]
# First the GPU works, then the network: communication is *exposed*. Yet the last layer's gradient was there early.
#
# **Exercise 2.2: buckets that overlap** (20 min, hard)
#
# `BucketedDDP(module, bucket_bytes)`:
#
# - First all ranks take rank 0's parameters and buffers.
# - Parameters fill buckets in reverse order: at most `bucket_bytes` and one dtype each; a larger one is alone.
# - As backward makes a bucket's last gradient, its `all_reduce` starts, but after those of earlier buckets: all ranks need one order.
# - `finish()`, after backward, sends what is left (no gradient counts as zero), waits, and leaves the mean in every `.grad`.
# - At most a quarter of the waiting above, on four T4s, remains.
#
# <details><summary>Hint 1: a question</summary>
# Who knows, in the middle of backward, that a bucket is complete? What must be counted, and set back when?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>Tensor.register_post_accumulate_grad_hook</code>; <code>torch.cat</code> and <code>split</code>; <code>all_reduce(..., async_op=True)</code> and its <code>wait()</code>.
# </details>


# %% exercise="2.2"
class BucketedDDP(torch.nn.Module):
    """Averages gradients over ranks while backward goes on: wrapped(x), backward, wrapped.finish(), optimizer step."""

    def __init__(self, module: torch.nn.Module, bucket_bytes: int):
        # SOLUTION
        super().__init__()
        self.module, self.buckets, self.sent, room = module, [], [], 0
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            if not self.buckets or parameter.nbytes > room or parameter.dtype != self.buckets[-1][0].dtype:
                self.buckets.append([])
                room = bucket_bytes
            self.buckets[-1].append(parameter)
            room -= parameter.nbytes
        self.missing = [len(bucket) for bucket in self.buckets]

        def send():
            bucket = self.buckets[len(self.sent)]
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
            self.sent.append((flat, dist.all_reduce(flat, async_op=True)))

        def came(number):
            self.missing[number] -= 1
            while len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] == 0:
                send()  # in the order of the buckets, on every rank

        self.send = send
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: came(number))
        # END SOLUTION

    def forward(self, *args):
        # SOLUTION
        return self.module(*args)
        # END SOLUTION

    def finish(self) -> None:
        # SOLUTION
        while len(self.sent) < len(self.buckets):
            self.send()  # a parameter took no part, so its bucket never filled
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            flat /= dist.get_world_size()
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)
        self.sent.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
        # END SOLUTION


# %%
labkit.check("2.2")

# %%
Mine, note_2 = mine_or(BucketedDDP, lab02.TorchDDP, "torch's DDP")
note_2 = note_2 and f" ({note_2})"
my_way = lambda model: Mine(model, 2**21), lambda wrapped: wrapped.finish()
bucketed = lab02.record_step(*my_way)
steps = {"after backward": naive, "buckets": bucketed, "torch's DDP": with_torch}
on_t4 = [replay(step.records, prices(t4s)) for step in steps.values()]
shown = [lane for name, step, p in zip(steps, steps.values(), on_t4, strict=True) for lane in lab02.lanes(step, p, name)]
ax = plot.timeline(shown, f"rank 0 of 4 T4 over PCIe 3, buckets of 2 MiB{note_2}")
plt.show()
Markdown(
    f"**Buckets leave {on_t4[1].exposed_s(0) / naive_exposed_s:.1%} of the waiting: a step takes {on_t4[1].time_s * 1e3:.2f} ms, not {on_t4[0].time_s * 1e3:.2f}. torch's DDP: {on_t4[2].time_s * 1e3:.2f}.**"
)

# %% [markdown]
# The same bytes, sent while there is work to do. Only the last bucket has little to hide behind; copies into buckets make backward longer.
#
# On *this machine*: the chain formula (buckets start when full and the network free), the replay, the clock.

# %%
print("Measuring this machine, if that was not done before, and three ways by turns: about 20 s ...", flush=True)
mine = laptop.cluster_of(this_laptop(4))
formula = [lab02.by_formula(naive, mine, size) for size in (None, 2**21, 2**21)]
replayed = [replay(step.records, prices(mine)).time_s for step in steps.values()]
clock = lab02.time_steps([(lambda model: model, average), my_way, torchs_way])  # by turns, not recorded
three = [("formula", formula), ("replay", replayed), ("clock", clock)]
ax = curves.bars(three, list(steps), "seconds a step", "4 ranks on this machine, buckets of 2 MiB")
Markdown(lab02.recut.against_the_clock(list(steps), formula, replayed, clock))

# %% [markdown]
# How large should a bucket be? Cut *your* recorded backward anew. (With the keyboard: Tab, then arrow keys.)

# %%
buckets.buckets(naive, also=mine)

# %% [markdown]
# Up to 128 KiB, the smallest matrix here, the curve is flat: each parameter has a bucket of its own. On these T4s even small buckets hide their latency; on 8 H100s with NVLink they no longer do. Large ones come late everywhere. Over 10 GbE no size hides much: the network needs longer than all of backward.
#
# "The larger the model, the more the all_reduce weighs", says an article that you may have read.
#
# **Question.** A model 1,000 times as large, the same tokens per GPU: by what factor does the ratio of all_reduce to computing grow? (Computing at peak FLOP/s. The timelines take longer for small ops, which wait for memory.)

# %%
larger_guess = labkit.predict("2.larger", ..., "times")


# %%
def all_reduce_to_compute(parameters, tokens, world_size=4):
    compute_s = 6 * parameters * tokens / t4s.node.device.peak("fp32")  # 2 forward, 4 backward
    return comm.time_s("all_reduce", 4 * parameters, world_size, t4s.node.intra) / compute_s


small, large = all_reduce_to_compute(3e6, 512), all_reduce_to_compute(3e9, 512)
more_tokens, more_ranks = all_reduce_to_compute(3e9, 4096), all_reduce_to_compute(3e9, 512, world_size=8)
larger_guess.reveal(large / small)
print(f"3 million parameters {small:.2f}, 3 billion {large:.2f}; 8 ranks {more_ranks:.2f}; 8 times the tokens {more_tokens:.2f}")
Markdown(f"**{large / small:.2f}: bytes and FLOPs both grow with the model. What counts is tokens per GPU.**")

# %% [markdown]
# ## 4 · When the batch does not fit
# Take it in *microbatches*: backward on each adds to `.grad`, then one step. Memory is that of one microbatch, and one synchronisation is enough.
#
# The usual way divides each mean loss by the number of microbatches. Here texts have 8 to 96 bytes that count; the rest is padding (target -100).
#
# **Question.** Rank 0 has microbatches of 8 and 88 counted bytes. How many times as much does a byte of the short one weigh?

# %%
weight_guess = labkit.predict("2.weight", ..., "times")


# %%
def mean_of_means(model, microbatches):
    for tokens, targets in microbatches:
        (loss_of(model(tokens), targets) / len(microbatches)).backward()
    average(model)


pieces = lab02.pictures.pieces()
short, long = (int((targets != -100).sum()) for _, targets in pieces[0])
off_percent, sent, _ = lab02.accumulate_picture(mean_of_means, pieces)
weight_guess.reveal(long / short)
Markdown(f"**A byte of the short text weighs {long / short:g} times as much, and the gradient is {off_percent:.0f}% off.**")

# %% [markdown]
# A mean of means again (lab 00), over microbatches *and* over ranks; nothing crashes. A widely used trainer had [this mistake until October 2024](https://huggingface.co/blog/gradient_accumulation).
#
# **Exercise 2.3: small steps, one sum** (10 min, core)
#
# `microbatches` is a list of (tokens, targets), targets of -100 not counted; token counts differ, ranks may have different numbers of microbatches, also none. Before the call every `.grad` is None; afterwards it is that of the mean loss over *all* counted tokens of all ranks; return that loss. Gradients travel once, besides them only scalars; hold one microbatch's graph at a time.
#
# <details><summary>Hint 1: a question</summary>
# A sum over tokens can be added in any order. When must the number of tokens be known?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>F.cross_entropy(..., reduction="sum")</code> ignores targets of -100; <code>(targets != -100).sum()</code>.
# </details>


# %% exercise="2.3"
def accumulate(model: torch.nn.Module, microbatches: list) -> float:
    """Gradients of the mean loss over all counted tokens of all ranks; returns that loss, the same on all ranks."""
    # SOLUTION
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64, device=device)  # loss and tokens
    for tokens, targets in microbatches:
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        loss.backward()
        total += torch.stack([loss.detach(), (targets != -100).sum()])
    dist.all_reduce(total)
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= total[1]
    return (total[0] / total[1]).item()
    # END SOLUTION


# %%
labkit.check("2.3")

# %%
error, gradients, title = lab02.accumulate_picture(accumulate, pieces)
ax = curves.bars([("", [off_percent, error])], ["mean of means", title], "error (%)", "gradient, against all tokens as one batch")
Markdown(f"**{title}: {curves.as_number(error)}% off; for {len(pieces[0])} microbatches a rank sent {gradients:.3g} × a gradient's bytes.**")

# %% [markdown]
# torch's DDP would all_reduce in *every* backward; `with ddp.no_sync():`, around forward and backward of all but the last, leaves that out. In DeepSpeed the batch is written down three times, and must agree: `train_batch_size` = microbatch × accumulation steps × ranks.
#
# ## 5 · When the data does not divide
# 18 samples, 4 ranks, 2 a rank and step: after two full steps two samples are left, and some ranks have nothing. A failure that is meant to happen:


# %%
def one_epoch(*sizes):
    model = torch.nn.Linear(3, 1).to(labkit.device())
    for size in sizes:
        if size == 0:
            continue  # nothing to learn from
        model(torch.ones(size, 3, device=labkit.device())).sum().backward()
        average(model)


try:
    labkit.launch(one_epoch, 4, rank_args=[(2, 2, 2), (2, 2, 0), (2, 2, 0), (2, 2, 0)])
except labkit.RankFailed as failure:
    print(failure)

# %% [markdown]
# Rank 0 waits for ranks that went home. All must make the same calls. (`with ddp.join():` around its loop makes them for a rank that has finished.)
#
# **Question.** torch's `DistributedSampler` avoids this. Of 18 samples, how many does it hand out to 4 ranks?

# %%
padded_guess = labkit.predict("2.padded", ...)

# %%
handed_out = [list(torch.utils.data.DistributedSampler(range(18), 4, rank)) for rank in range(4)]
every = sum(handed_out, [])
padded_guess.reveal(len(every))
Markdown(f"**{len(every)}: {len(every) - len(set(every))} of the 18 count twice, so that all ranks have {len(handed_out[0])}.** `drop_last=True` would lose {18 % 4}.")

# %% [markdown]
# And a plain `DataLoader(dataset, shuffle=True)`, as in many a guide, knows nothing of ranks: each would draw from all 18.
#
# **Exercise 2.4: every sample once** (8 min, core)
#
# Without communication, and without touching the global random generators. A list of steps, equally many on all ranks; each is `(indices, weight)`, with at most `batch_size` indices, all ints. Every sample once an epoch over all ranks; another order each epoch, the same for the same (seed, epoch). All steps but the last are full. `weight` is this rank's share of the step's samples; with none, `([], 0.0)`.
#
# <details><summary>Hint 1: a question</summary>
# How can ranks that do not talk agree on one random order?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>torch.randperm(n, generator=torch.Generator().manual_seed(...))</code>; slices of <code>world_size * batch_size</code>, then of <code>batch_size</code>.
# </details>


# %% exercise="2.4"
def shard_sampler(
    num_samples: int, batch_size: int, rank: int, world_size: int, epoch: int, seed: int = 0
) -> list[tuple[list[int], float]]:
    """This rank's steps of an epoch: (indices, share of the step's samples)."""
    # SOLUTION
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(num_samples, generator=generator).tolist()
    steps = []
    for start in range(0, num_samples, world_size * batch_size):
        step = order[start : start + world_size * batch_size]
        mine = step[rank * batch_size : (rank + 1) * batch_size]
        steps.append((mine, len(mine) / len(step)))
    return steps
    # END SOLUTION


# %%
labkit.check("2.4")

# %%
rows, steps_of, title, last_step = lab02.epoch_picture(shard_sampler, 18, 2, 4)
ax = plot.shards(rows, 18, f"{title}; in each box its step", labels=steps_of)
plt.show()
print("last step:", last_step)

# %% [markdown]
# A rank's gradient times its weight, *summed* over ranks, is the gradient of the step. A weight of 0 joins the sum and changes nothing.

# %% [markdown]
# ## 6 · When the data comes late
# A sample costs a read and some decoding; this dataset is slow on purpose. The usual cures: workers, prefetching, keeping it in memory.
#
# **Question.** Without any: for how many percent of the time does a rank wait for data?

# %%
in_memory = lab02.load_with(lab02.SETTINGS[-1:], steps=16, batch=8)
sample_s, step_s = in_memory[0].start_s / (8 * 17), median(in_memory[0].compute_s)  # 16 steps after a first one
print(f"reading and decoding a sample {sample_s * 1e3:.1f} ms, a batch 8 samples; computing a step {step_s * 1e3:.1f} ms")

# %%
starved_guess = labkit.predict("2.starved", ..., "%")

# %%
loads = lab02.load_with(lab02.SETTINGS[:-1], steps=16, batch=8) + in_memory
print(lab02.loading_table(loads))
waiting = [1e3 * median(each.wait_s) for each in loads]
computing = [1e3 * median(each.compute_s) for each in loads]
names = [each.setting.name.replace(", ", ",\n") for each in loads]
ax = curves.bars([("waits for data", waiting), ("computes", computing)], names, "ms a step", "one rank, a slow dataset")
plt.show()
starved_guess.reveal(100 * loads[0].starved)
shares = {each.setting.name: f"{each.starved:.0%}" for each in loads}
Markdown(f"**Waiting: {shares['no workers']} without workers, {shares['2 workers']} with two, {shares['in memory']} from memory, which took {loads[-1].start_s:.1f} s to fill.**")

# %% [markdown]
# Workers cost memory and cores (last columns); training shares these, so "computes" varies. More than it takes give nothing.
#
# One late rank makes *all* wait in all_reduce. A profiler says "communication"; yet faster loading sends no byte less, and a faster network would not help.

# %% [markdown]
# ## 7 · More workers
# Each rank keeps its batch (*weak scaling*), so four ranks train on four times the tokens a step. Measured with torch's DDP.
#
# **Question.** How many times the tokens per second of one rank will four ranks reach, here?

# %%
speed_guess = labkit.predict("2.speed_up", ..., "times")

# %%
scaled = train_on((1, 2, 4))
ranks, speeds = [each.world_size for each in scaled], [each.tokens_per_s for each in scaled]
print(lab02.table(scaled))
left, right = plot.side_by_side(2, width=4.2, height=2.8)
ideal = ("perfect", ranks, [n * speeds[0] for n in ranks], "dashed")
ax = curves.lines([("measured", ranks, speeds, "points"), ideal], "ranks", "tokens per second", "this machine", ax=left)
ax.set_xticks(ranks)
many, t4, lines = (1, 2, 4, 8, 16, 32, 64), t4s.node.device, []
for wire, size in (("PCIe 3", None), ("PCIe 3", 2**21), ("100 GbE", 2**21)):  # Ethernet: a card for each GPU
    on = many[:4] if wire == "PCIe 3" else many  # a node has 8 cards
    shares = [100 * share for share in lab02.efficiencies(naive, t4, hardware.link(wire), on, size)]
    lines.append((f"{wire}, {'buckets' if size else 'one by one'}", on, shares, "line"))
ax = curves.lines(lines, "ranks", "efficiency (%)", "T4s, from your record", ax=right)
curves.doubling_axis(ax, many)
plt.show()
speed_guess.reveal(speeds[-1] / speeds[0])
Markdown(f"**Two ranks: {speeds[1] / speeds[0]:.2f} times the tokens of one, four: {speeds[2] / speeds[0]:.2f}, on {scaled[0].cores:g} cores. 64 T4s with buckets over 100 GbE, a card for each, work {shares[-1]:.0f}% of the time.**")

# %% [markdown]
# Ranks cannot be faster than the cores they share, and gloo works on these too: with few cores, two ranks can do less than one. Other programs take some as well: on a busy machine, run the cell again. On GPUs, bytes per rank hardly grow with n, but a ring's latency does: 2(n-1) messages a bucket.
#
# The experiment is an ordinary program:
#
# ```
# torchrun --standalone --nproc-per-node 4 -m labkit.cli run lab02.scaling
# ```
#
# ## 8 · The same in torch and DeepSpeed
# Your buckets against `DistributedDataParallel`, on the same model and the same rows:

# %%
apart = max(abs(a - b) for a, b in zip(bucketed.losses, with_torch.losses, strict=True))
sent = [step.records[0].sent_bytes for step in (bucketed, with_torch)]
print(f"{len(bucketed.losses)} steps: losses differ by {apart:.0e}; sent a step {sent[0]:,} and {sent[1]:,} bytes{note_2}")

# %% [markdown]
# DeepSpeed without ZeRO, *stage 0*, is plain data parallel as well. First with the batch sizes of a published guide for 8 GPUs, here on 4 ranks; then with sizes that agree.


# %%
def with_deepspeed(config):
    from labkit.model.deepspeed import start_deepspeed

    torch.manual_seed(0)
    engine, _ = start_deepspeed(Llama(Shape()), config, learning_rate=1e-3)
    losses = []
    for tokens, targets in batches(4, 64, rank=dist.get_rank(), world_size=4, steps=3):
        with labkit.Trace() as trace:
            losses.append(loss_of(engine(tokens.to(engine.device)), targets.to(engine.device)))
            engine.backward(losses[-1])
        engine.step()
    return [loss.item() for loss in losses], [(c.op, c.num_bytes) for c in trace.record.collectives]


guide = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
agrees = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}}
for config in (guide, agrees):
    outcome = labkit.run_ranks(with_deepspeed, 4, config, prints="quiet", preload=("deepspeed",))
    print(outcome.cause.sentence if outcome.cause else f"3 steps; each sent {outcome.results[0][1]}")
if outcome.cause is None:
    off = max(abs(a - b) for a, b in zip(outcome.results[0][0], found[0][0][:3], strict=True))
    print(f"losses of rank 0, DeepSpeed's and those of section 2: {off:.0e} apart")

# %% [markdown]
# 4 · 8 · 4 is not 32, nor is 4 · 8 · 8: that guide's configuration starts on one GPU only. The second run sends one gradient a step, in one all_reduce.
#
# On a cluster a script calls `dist.init_process_group()` and a launcher starts it; `ds_config.json` holds what is `agrees` above.
#
# ```
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 train.py
# deepspeed --num_gpus 8 train.py --deepspeed_config ds_config.json
# ```

# %% [markdown]
# | you wrote | torch and DeepSpeed have | remember |
# |---|---|---|
# | `average_gradients` | `loss.backward()` under DDP; with `find_unused_parameters=True` where a parameter may take no part | agree on gradients, once a step |
# | `BucketedDDP` | `DistributedDataParallel`, `bucket_cap_mb`; `reduce_bucket_size` | start early, wait late |
# | `accumulate` | `no_sync()`; `gradient_accumulation_steps` | sum over a count, never a mean of means |
# | `shard_sampler` | `DistributedSampler`, `model.join()` | an empty batch joins with weight 0 |
#
# **An open question.** Each of your four ranks holds all parameters, all gradients and the optimizer's whole state: the same numbers, four times. How much memory is that for a model of a billion parameters, and which of it is really needed everywhere? Lab 03 measures it. (`labkit progress` in a terminal shows your points.)
