# %% [markdown]
# # 07 Pipeline parallel
#
# **Why are three of your four GPUs idle, and what can you do about it?**
#
# About 90 minutes, after labs 00 and 03; a hard exercise takes 30 more. No GPU: four real ranks pass hidden states on.

# %%
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from IPython.display import Markdown

from labkit.check.check import mine_or
from labkit.cost import hardware
from labkit.cost.laptop import cluster_of
from labkit.cost.named import named
from labkit.labs.lab07 import engines, pictures, standins
from labkit.labs.lab07.claims import claims
from labkit.record.laptop import laptop as this_laptop
from labkit.record.prices import prices
from labkit.record.replay import replay
from labkit.schedule import grid, theory
from labkit.schedule.classic import gpipe as gpipe_schedule
from labkit.schedule.classic import interleaved
from labkit.schedule.classic import one_f_one_b as one_f_one_b_schedule
from labkit.schedule.messages import received, sent
from labkit.schedule.timing import play
from labkit.schedule.validate import validate
from labkit.view import curves, draft, editor, gantt, pipeline

# %% [markdown]
# **Where this hour leads.** A model cut into four stages, a batch cut into six microbatches. Blue computes, a number is a microbatch, grey is idle; at the right, the most a rank keeps. You will write this loop, and then draw a better one.

# %%
axes = gantt.with_kept(play(one_f_one_b_schedule(4, 6)), "1F1B, 4 ranks, 6 microbatches")

# %% [markdown]
# ## 1 · One worker, and four stages
# Lab 06 cut matrices; here the *stack* is cut. A rank has some layers, its *stage*. Hidden states go to the next rank, gradients come back. Between two ranks travels one tensor, however many layers they have.

# %%
serial = engines.serial(microbatches=8, steps=10)
Markdown(f"**Serial baseline: ten steps of a small Llama take the loss from {serial.losses[0]:.4f} to {serial.losses[-1]:.4f}.**")

# %% [markdown]
# The slowest stage sets the pace. The first one has the embedding besides its layers, the last one the head and the loss.
#
# **Exercise 7.1: share the layers out** (10 min, easy). `split_stages(layers, num_stages, embedding, head)`: `layers` is their number; a list of how many each stage gets, one or more, so that the slowest stage is as fast as can be. `embedding` and `head` are times, in layers' worth: 0.5 is half a layer.
#
# <details><summary>Hint 1: a question</summary>
# Give out layers one by one. Which stage should have the next one?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>min(range(num_stages), key=...)</code>.
# </details>


# %% exercise="7.1"
def split_stages(layers, num_stages, embedding, head):
    """Layers per stage."""
    # SOLUTION
    counts, besides = [1] * num_stages, [0.0] * num_stages
    besides[0] += embedding
    besides[-1] += head
    for _ in range(layers - num_stages):
        lightest = min(range(num_stages), key=lambda stage: counts[stage] + besides[stage])
        counts[lightest] += 1
    return counts
    # END SOLUTION

# %%
labkit.check("7.1")

# %%
split, note_1 = mine_or(split_stages, standins.even_stages)
shape = named("llama-3.1-8b")
head = pictures.head_in_layers(shape)
ways = {"even": standins.even_stages(shape.layers, 8, 0, head), f"split_stages {note_1}": split(shape.layers, 8, 0, head)}
series = [(name, pictures.stage_times(counts, 0, head)) for name, counts in ways.items()]
ax = curves.bars(series, [f"stage {stage}" for stage in range(8)], "layers' time", f"{shape.name} on 8 stages; its head takes {head:.1f} layers' time")
plt.show()
slowest = [max(times) for _, times in series]
Markdown(f"**The slowest of eight stages: {slowest[0]:.2f} layers' time when layers are even, {slowest[1]:.2f} with split_stages.**")

# %% [markdown]
# ## 2 · One batch, four ranks
# A batch goes down all stages, and its gradient comes back up. All stages take equally long, backward twice as long as forward.
#
# **Question.** How many percent of the time is a rank idle?

# %%
waiting_guess = labkit.predict("7.waiting", ..., "%")  # your number in place of the dots

# %%
alone = play(gpipe_schedule(4, 1))
axes = gantt.with_kept(alone, "one batch, not cut")
plt.show()
waiting_guess.reveal(100 * alone.idle_share)
Markdown(f"**{alone.idle_share:.0%}: each of four ranks waits for three others, forward and backward.**")

# %% [markdown]
# p ranks. Cut the batch into m *microbatches*: while rank 1 has the first, rank 0 begins the second. GPipe (arXiv:1811.06965): all forwards, then all backwards.
#
# **Question.** Four ranks, eight microbatches. How many percent idle now?

# %%
bubble_guess = labkit.predict("7.bubble", ..., "%")

# %% [markdown]
# **Exercise 7.2: GPipe** (15 min, core)
#
# `gpipe(stage, inputs, targets, shape, loss_fn=F.mse_loss)`, called on every rank:
#
# - `stage`: this rank's module. `inputs`: m tensors on rank 0; `targets`: m on the last rank; elsewhere m times None.
# - What ranks send each other has `shape`. All forwards first; a graph ends where a message begins.
# - Gradients are added to `.grad`, as those of the *mean* loss over microbatches; the last rank returns that mean.
#
# <details><summary>Hint 1: a question</summary>
# What was received has no graph. Backward must leave a gradient in it, to be sent back. What must it have before the stage uses it?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>dist.send</code>, <code>dist.recv</code>, <code>Tensor.requires_grad_()</code>, <code>y.backward(gradient)</code>, <code>x.grad</code>.
# </details>


# %% exercise="7.2"
def gpipe(stage, inputs, targets, shape, loss_fn=F.mse_loss):
    """One step; the mean loss on the last rank."""
    # SOLUTION
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    device = next(stage.parameters()).device
    kept, losses = [], []
    for x, target in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty(shape, device=device)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        else:
            y = loss_fn(y, target) / len(inputs)
            losses.append(y.detach())
        kept.append((x, y))
    for x, y in kept:
        gradient = None
        if rank < last:
            gradient = torch.empty(shape, device=device)
            dist.recv(gradient, rank + 1)
        y.backward(gradient)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return sum(losses) if rank == last else None
    # END SOLUTION

# %%
labkit.check("7.2")

# %% [markdown]
# Recorded on real ranks, replayed on a link that costs nothing: their compute alone decides.

# %%
by_gpipe, note_2 = mine_or(gpipe, standins.gpipe)
many = (1, 2, 4, 8, 16)
records = {m: engines.recorded(by_gpipe, 4, m) for m in many}
idle = [100 * pictures.on_link(records[m]).idle_share for m in many]
series = [("(p-1)/(m+p-1)", many, [100 * theory.idle_share(4, m) for m in many], "line")]
series.append(("overhead (p-1)/m", many, [100 * theory.overhead(4, m) for m in many], "dashed"))
series.append((f"recorded and replayed {note_2}", many, idle, "points"))
ax = curves.lines(series, "microbatches m", "%", "GPipe on 4 ranks: idle time")
ax.set_ylim(0, 120)
plt.show()
bubble_guess.reveal(idle[3])
Markdown(f"**{idle[3]:.1f}% of all time with 8 microbatches, {idle[4]:.1f}% with 16. Per cent of what? The same bubble is {theory.overhead(4, 8):.1%} on top of the work, as Megatron-LM counts it.**")

# %% [markdown]
# Papers mix two definitions: idle over *all* time, (p−1)/(m+p−1), and over the *ideal* time, (p−1)/m, which can pass 100%.
#
# Now the clock, two ranks on this machine. Formula: m+1 times a stage's own time for a microbatch.

# %%
print("Measuring this machine, if that was not done before: some seconds ...", flush=True)
few, machine = (1, 2, 4, 8), cluster_of(this_laptop(2))
alone_s, clock_s = engines.timed(by_gpipe, 2, few)
formula_s = [(m + 1) * alone_s for m in few]
replay_s = [replay(engines.recorded(by_gpipe, 2, m, 512, 128), prices(machine)).time_s for m in few]
series = [(name, [1e3 * each for each in found]) for name, found in (("formula", formula_s), ("replay", replay_s), ("clock", clock_s))]
ax = curves.bars(series, [f"m = {m}" for m in few], "ms", f"a step of GPipe, 2 ranks, this machine {note_2}")
plt.show()
grown = [each[-1] / each[0] for each in (formula_s, replay_s, clock_s)]
off = [each[-1] / clock_s[-1] - 1 for each in (formula_s, replay_s)]
print(f"m = 8, against the clock: formula {off[0]:+.0%}, replay {off[1]:+.0%}")
Markdown("**Eight microbatches instead of one take {:.1f} times as long by formula, {:.1f} by replay, {:.1f} by the clock; one after the other they would take 8.**".format(*grown))

# %% [markdown]
# The clock includes what the formula leaves out: messages, Python between them, and whatever else this machine does; when it is busy, eight can take longer than 8. Run it again then.
#
# ## 3 · What a forward leaves behind
# More microbatches, less bubble. But each forward leaves activations until its backward, and GPipe has all m of them.
#
# *1F1B* (arXiv:2006.09503): a backward as soon as there is one. Rank r does p−1−r forwards, then one forward and one backward in turn, then the backwards that are left.
#
# **Question.** Rank 0 of 4, eight microbatches: how many times as many activations does GPipe keep?

# %%
kept_guess = labkit.predict("7.kept", ..., "times")

# %% [markdown]
# **Exercise 7.3: one forward, one backward** (20 min, core)
#
# `one_f_one_b(stage, inputs, targets, shape, loss_fn=F.mse_loss)`: as 7.2, in this order.
#
# - Rank r keeps at most min(m, p−r) microbatches, and of what was sent or received a few tensors, not m: a handle of `isend` keeps its tensor until you let go of it.
# - A send is over only when its receiver takes it: no rank may wait in a send for one that waits in a send.
#
# <details><summary>Hint 1: a question</summary>
# In the middle, rank r sends an output down while rank r+1 sends a gradient up. Who receives?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>dist.batch_isend_irecv</code>: what goes to a neighbour and what comes from it, in one batch; local functions <code>forward()</code> and <code>backward()</code>.
# </details>


# %% exercise="7.3"
def one_f_one_b(stage, inputs, targets, shape, loss_fn=F.mse_loss):
    """One step; the mean loss on the last rank."""
    # SOLUTION
    rank, p, m = dist.get_rank(), dist.get_world_size(), len(inputs)
    before, after, kept, losses = rank - 1, rank + 1, [], []

    def swap(peer, sent=None, receives=True):
        """To and from a neighbour in one batch; gives what came."""
        if not 0 <= peer < p:
            return None
        calls = [] if sent is None else [dist.P2POp(dist.isend, sent, peer)]
        came = torch.empty(shape, device=next(stage.parameters()).device) if receives else None
        calls += [dist.P2POp(dist.irecv, came, peer)] if receives else []
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return came

    def forward(i, x):
        x = inputs[i] if rank == 0 else x.requires_grad_()
        y = stage(x)
        if rank == p - 1:
            y = loss_fn(y, targets[i]) / m
            losses.append(y.detach())
        kept.append((x, y))
        return y.detach()

    def backward(gradient):
        x, y = kept.pop(0)  # the oldest
        y.backward(gradient)
        return x.grad

    warm_up = min(m, p - 1 - rank)
    for i in range(warm_up):
        swap(after, forward(i, swap(before)), receives=False)
    x = swap(before) if warm_up < m else None
    for i in range(warm_up, m):
        gradient = swap(after, forward(i, x))
        x = swap(before, backward(gradient), receives=i + 1 < m)
    for _ in range(warm_up):
        swap(before, backward(swap(after)), receives=False)
    return sum(losses) if rank == p - 1 else None
    # END SOLUTION

# %%
labkit.check("7.3")

# %%
by_1f1b, note_3 = mine_or(one_f_one_b, standins.one_f_one_b)
turns = engines.recorded(by_1f1b, 4, 8)
held = {"GPipe": pictures.kept_bytes(records[8]), "1F1B": pictures.kept_bytes(turns)}
ax = curves.bars([(name, [each / 1e3 for each in found]) for name, found in held.items()], [f"rank {r}" for r in range(4)], "kB", f"activations, most at a time, 8 microbatches {note_3}")
plt.show()
kept_guess.reveal(held["GPipe"][0] / held["1F1B"][0])
played = pictures.on_link(turns)
Markdown(f"**{held['GPipe'][0] / held['1F1B'][0]:.1f} times on rank 0, and the more microbatches, the more: GPipe keeps all, 1F1B at most as many as there are ranks (rank 3 keeps the loss's input besides). The bubble is the same: {played.idle_share:.1%}, GPipe {idle[3]:.1f}%. 1F1B saves memory, not time; the memory saved pays for more microbatches.**")

# %%
trained = {"GPipe": engines.train(by_gpipe, 4, 8, steps=10), "1F1B": engines.train(by_1f1b, 4, 8, steps=10)}
series = [("serial", range(1, 11), serial.losses, "line")]
series += [(name, range(1, 11), trained[name].losses, style) for name, style in (("GPipe", "dashed"), ("1F1B", "points"))]
ax = curves.lines(series, "step", "loss", f"a Llama on 4 stages {note_3 or note_2}", from_zero=False)
plt.show()
off = {name: max(abs(a - b) for a, b in zip(each.losses, serial.losses, strict=True)) for name, each in trained.items()}
kept = trained["1F1B"].kept
Markdown(f"**Serial's losses to {max(off.values()):.0e}. Of {serial.kept[0]:,} parameters the ranks keep {', '.join(f'{each:,}' for each in kept)}: none of them twice.**")

# %% [markdown]
# ### A send that waits
# Now every send waits until it is taken, as `dist.send` does. 1F1B on four ranks, messages alone; 2F1 is stage 2, forward, microbatch 1.
#
# **Question.** Two neighbours will wait for each other for ever. Which ones? Give the first rank's number.

# %%
stuck_guess = labkit.predict("7.stuck", ...)


# %%
def blocking(schedule):
    tensor = torch.zeros(8, device=labkit.device())
    for action in schedule.actions[dist.get_rank()]:
        if (before := received(schedule, action)) is not None:
            dist.recv(tensor, before.source)
        if (after := sent(schedule, action)) is not None:
            dist.send(tensor, after.destination)


schedule = one_f_one_b_schedule(4, 8)
fault = validate(schedule, sends="blocking")
print("predicted:", fault.sentence)
outcome = labkit.run_ranks(blocking, 4, schedule, prints="quiet")
print("really:   ", outcome.cause.sentence)
stuck_guess.reveal(fault.rank)
Markdown(f"**Ranks {fault.rank} and {fault.rank + 1}, after {fault.position} actions each: one sends an output down, the other a gradient up, and neither receives. No rank's own order is wrong.**")

# %% [markdown]
# Both halves posted in one batch, and it is gone: Megatron-LM calls the pair `send_forward_recv_backward`. With gloo `isend` alone is enough. NCCL does what two ranks post for each other in the order of posting, `isend` or not.

# %% [markdown]
# ## 4 · One weight at both ends
# Many small models *tie* the head to the embedding: one matrix, used first and last. In a pipeline these are two ranks, each with a copy and half of its gradient.
#
# **Exercise 7.4: the sum of both ends** (10 min, core). `sum_tied(weight)`, called on every rank after backward. On the first and the last rank, `weight` is the tied parameter; between them, None. Afterwards both `.grad` are the sum. Ranks between send nothing.
#
# <details><summary>Hint 1: a question</summary>
# Sum or mean? The serial model adds up what both uses give.
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>dist.P2POp</code>, <code>dist.batch_isend_irecv</code>. An all_reduce needs a group of these two, and making one is a call of <i>all</i> ranks.
# </details>


# %% exercise="7.4"
def sum_tied(weight):
    """Add up the gradients of the first and the last rank's copy."""
    # SOLUTION
    if weight is None:
        return
    other = dist.get_world_size() - 1 - dist.get_rank()
    theirs = torch.empty_like(weight.grad)
    calls = [dist.P2POp(dist.isend, weight.grad, other), dist.P2POp(dist.irecv, theirs, other)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    weight.grad += theirs
    # END SOLUTION

# %%
labkit.check("7.4")

# %%
share, note_4 = mine_or(sum_tied, standins.sum_by_labkit)
tied_serial = engines.serial(8, steps=10, shape=engines.TIED)
both = {"summed": engines.train(by_1f1b, 4, 8, 10, share), "each its own": engines.train(by_1f1b, 4, 8, 10, lambda weight: None)}
apart = {name: [abs(a - b) for a, b in zip(each.losses, tied_serial.losses, strict=True)] for name, each in both.items()}
drift = {name: (each.tied[0] - each.tied[1]).abs().max().item() for name, each in both.items()}
print("off from serial at steps 1, 2, 10:", {name: [f"{each[k]:.0e}" for k in (0, 1, 9)] for name, each in apart.items()})
Markdown(f"**Without the sum the first loss is right, the second off by {apart['each its own'][1]:.3f}, and after ten steps the two copies differ by up to {drift['each its own']:.2f}: two weights now. With it, by {drift['summed']:.0f}.** {note_4}")

# %% [markdown]
# ## 5 · Smaller bubbles
# Two ideas. *Interleaved* (arXiv:2104.04473): v smaller stages per rank, so a rank waits for shorter ones; v times the messages. *Zero bubble* (arXiv:2401.10241): cut backward into **I**, the gradient of the input, which the rank before waits for, and **W**, the gradients of the weights, which nobody waits for. W fills gaps: *ZB-H1* is 1F1B with its Ws there; no rank keeps more than rank 0.
#
# **Question.** F, I and W take equally long. ZB-H1, four ranks, eight microbatches: how many percent of all time idle?

# %%
zero_guess = labkit.predict("7.zero", ..., "%")

# %%
found = {each.name: each for each in pictures.bubbles(4, 8)}
print(pictures.bubbles_table(4, 8))
zero_guess.reveal(100 * found["ZB-H1"].played)
Markdown(f"**{found['ZB-H1'].played:.1%} against {found['1F1B'].played:.1%}: the bubble of a rank is (p−1)(F+I−W) instead of (p−1)(F+I+W), with the same {found['ZB-H1'].kept:g} microbatches in flight.**")

# %% [markdown]
# Interleaved, of the work: (p−1)/(vm). ZB-H2 brings a rank's bubble down to (p−1)(F+I−2W), zero when all are equal, for about twice the activations. ZB-V has both ideas: two stages a rank, laid out in a V, so that rank 0 has the first and the last.
#
# Move one control at a time. Which schedule minds that backward takes three times as long?

# %%
pipeline.pipeline()

# %% [markdown]
# ### Draw one
# Below are F and I in 1F1B's order, four ranks, four microbatches. W is missing: 16 blocks. Choose W, click into the grid; "to played time" shows where the gaps are. The text says the same: without widgets, edit it there. A full schedule can be run on ranks.

# %%
start = draft.read(grid.text(one_f_one_b_schedule(4, 4)).replace("1F1B", "mine").replace("B", "I"))
drawing = editor.editor(draft.settled(start).text, run=engines.executed)
drawing

# %%
print(draft.look(draft.read(drawing.text)).sentence)

# %% [markdown]
# **Exercise 7.5: beat 1F1B** (30 min, hard)
#
# `beat_1f1b(ranks, microbatches)`: your drawing as a rule, giving the text of a schedule for any sizes (microbatches a multiple of ranks). Ranks must idle less than with 1F1B when F, I and W take equally long, and keep at most 1.5 times what 1F1B's first rank keeps. Any idea will do: W into gaps, or several stages a rank. It is then run on ranks, and gradients must equal serial.
#
# <details><summary>Hint 1: a question</summary>
# The last rank has no gaps at first. How many Ws can it put off, and where do they go? And rank 0?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>print(drawing.text)</code> shows the format; of a row only the order counts, dots may be left out. ZB-H1: figure 3 of arXiv:2401.10241; rank r does its first W r microbatches late.
# </details>


# %% exercise="7.5"
def beat_1f1b(ranks, microbatches):
    """A schedule's text; its ranks idle less than 1F1B's."""
    # SOLUTION
    m, stages = microbatches, " ".join(map(str, range(ranks)))
    lines = [f"schedule zero bubble: {ranks} ranks, {m} microbatches, stages on ranks {stages}"]
    for r in range(ranks):
        warm_up = min(m, ranks - 1 - r)
        row = [f"{r}F{i}" for i in range(warm_up)]
        for i in range(m):
            if warm_up + i < m:
                row.append(f"{r}F{warm_up + i}")
            row.append(f"{r}I{i}")
            if i >= r:  # r of the Ws wait for the end, where 1F1B has its gaps
                row.append(f"{r}W{i - r}")
        row += [f"{r}W{i}" for i in range(max(0, m - r), m)]
        lines.append(f"rank {r}: {' '.join(row)}")
    return "\n".join(lines)
    # END SOLUTION

# %%
labkit.check("7.5")

# %%
write, note_5 = mine_or(beat_1f1b, standins.zb_h1_text)
mine = grid.parse(write(4, 8))
axes = gantt.with_kept(play(mine), f"{mine.name}, 8 microbatches {note_5}", "F = I = W")
plt.show()
Markdown(f"**Idle {play(mine).idle_share:.1%}, 1F1B {theory.idle_share(4, 8):.1%}; {engines.executed(mine)}.**")

# %% [markdown]
# ## 6 · What the wire costs
# Llama 3.1 405B, 126 layers, on 16 GPUs. For a microbatch, a pipeline's GPU sends a hidden state on and a gradient back.
#
# **Question.** How many times as many bytes does tensor parallel send from each GPU?

# %%
wire_guess = labkit.predict("7.wire", ..., "times")

# %%
large, card = named("llama-3.1-405b"), hardware.device("H100")
links = ("NVLink 4", "InfiniBand NDR", "100 GbE", "10 GbE")
made = {"1F1B": one_f_one_b_schedule(16, 32), "interleaved, v = 4": interleaved(16, 32, 4)}
series = [(name, [100 * pictures.with_messages(each, large, 8192, card, hardware.link(link)) for link in links]) for name, each in made.items()]
ax = curves.bars(series, links, "% idle", f"{large.name}, 16 stages or 64, 32 microbatches of 8,192 tokens, H100")
plt.show()
times = pictures.wire(large, 16, 8192).times
wire_guess.reveal(times)
fast, slow = series[0][1][1], series[0][1][3]
Markdown(f"**{times:,.0f} times. Over InfiniBand 1F1B idles {fast:.1f}%, where theory without messages says {theory.idle_share(16, 32):.1%}; over 10 GbE {slow:.0f}%. Pipelines are for *between* nodes.**")

# %% [markdown]
# ## 7 · The same in torch and DeepSpeed
# The same four stages, the same batches: `torch.distributed.pipelining`, and DeepSpeed's `PipelineModule`, whose schedule is 1F1B.

# %%
print("torch, then DeepSpeed, on four ranks: about 20 s ...", flush=True)
theirs = {"torch 1F1B": engines.by_torch("Schedule1F1B", 4, 8, steps=3), "DeepSpeed": engines.by_deepspeed(4, 8, steps=3)}
for name, each in (trained | theirs).items():
    off = max(abs(a - b) for a, b in zip(each.losses, serial.losses, strict=False))
    print(f"{name:10} {len(each.losses):2} steps, loss {each.losses[0]:.4f} to {each.losses[-1]:.4f}, within {off:.0e} of serial")
print("ZeRO-2 with a pipeline:", engines.refusal(2))

# %% [markdown]
# torch has the schedules of section 5 too: `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`. In a terminal, `labkit run lab07.schedules` times five schedules on this machine's CPU. On a cluster:
#
# ```
# model = PipelineModule(layers, num_stages=4, loss_fn=loss, partition_method="parameters")
# {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "zero_optimization": {"stage": 1}}
#
# deepspeed --num_gpus 4 train.py --deepspeed_config ds_config.json
# torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 train.py
# ```
#
# `gradient_accumulation_steps` is m here: `train_batch` takes m microbatches from an iterator.
#
# ## 8 · What is said of it
# Three guides on training large models are widely read. The first never mentions pipelines.

# %%
for claim in claims():
    print(f"{claim.verdict}: {claim.said}\n    {claim.figure}")

# %% [markdown]
# | you wrote | torch and DeepSpeed have | remember |
# |---|---|---|
# | `split_stages` | `partition_method` | the slowest stage sets the pace |
# | `gpipe` | `ScheduleGPipe` | idle (p−1)/(m+p−1); keeps m |
# | `one_f_one_b` | `Schedule1F1B`; DeepSpeed's `TrainSchedule` | the same bubble; keeps min(m, p−r) |
# | `sum_tied` | `TiedLayerSpec` | one weight, two ranks, one sum |
# | `beat_1f1b` | `ScheduleInterleaved1F1B`, `ScheduleZBVZeroBubble` | W can wait |

# %% [markdown]
# **An open question.** Tensor parallel inside a node, pipeline between nodes, data parallel over all: of 16,384 GPUs, which neighbour should be which? Lab 08 builds the mesh. (`labkit progress` in a terminal shows your points.)
