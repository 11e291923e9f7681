# %% [markdown]
# # 03 Where the memory goes
#
# **A 1B model is 2 GB of weights. Why does training it need so much more?**
#
# About 60 minutes, after lab 02. No GPU: what a step holds is recorded on this machine, byte by byte, and counted for models that would not fit.

# %%
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from IPython.display import Markdown
from torch.utils.checkpoint import checkpoint

from labkit.check.check import mine_or
from labkit.cost import hardware, memory, shapes, states
from labkit.cost.layout import Layout
from labkit.cost.named import named
from labkit.labs import lab03
from labkit.model.llama import Llama, Shape, loss_of
from labkit.model.text import batches
from labkit.record.allocator import allocated
from labkit.record.held import held as bytes_held
from labkit.record.prices import prices
from labkit.record.replay import replay
from labkit.view import curves, held, plot
from labkit.view import memory as explorer

# %% [markdown]
# **Where this hour leads.** One training step of a small Llama, every tensor in it, from forward to the optimizer's step:

# %%
plain = lab03.record_step(4, 128)
ax = held.over_time(plain.held, f"a Llama of {plain.parameters:,} parameters, 4 x 128 tokens, AdamW, fp32")
plt.show()
weights, peak = plain.held.begin["parameter"], plain.held.peak_bytes
Markdown(f"**{weights / 1e6:.1f} MB of weights, {peak / 1e6:.1f} MB at the peak.** You will be able to say where each of them comes from.")

# %% [markdown]
# ## 1 · What is there before the first token
# Parameters, gradients, and what the optimizer keeps: the *model states*. Below are real ones, in fp32.
#
# **Question.** A model of a billion parameters, in bf16, trained with AdamW: how many GB of states?

# %%
states_guess = labkit.predict("3.states", ..., "GB")  # your number in place of the dots

# %%
for name in ("sgd", "momentum", "adamw"):
    step = lab03.record_step(1, 16, name)
    kinds = {kind: step.held.begin[kind] / step.parameters for kind in ("parameter", "optimizer")}
    kinds["gradient"] = max(step.held.by_kind["gradient"]) / step.parameters
    print(f"{name:9}", "  ".join(f"{kind} {num_bytes:.2f} bytes" for kind, num_bytes in kinds.items()), "per parameter")
weight = torch.tensor(256.0)
print("256 + 1 is", (weight + 1).item(), "in fp32,", (weight.bfloat16() + 1).item(), "in bf16")

# %% [markdown]
# AdamW keeps a mean of gradients and one of their squares. *Mixed precision* computes in 16 bits, where a small update is lost (256 + 1): the optimizer keeps a *master copy* in fp32.
#
# **Exercise 3.1: sixteen bytes a parameter** (5 min, easy)
#
# Bytes of (parameters, gradients, optimizer). precision "fp32": all in 4 bytes. "bf16", "fp16": parameters and gradients in 2; the master copy counts as the optimizer's (ZeRO's convention, 2 + 2 + 12). optimizer "sgd" keeps nothing more; "momentum" and "lion" one number in fp32; "adam" and "adamw" two; "adamw8bit" two of one byte.
#
# <details><summary>Hint 1: a question</summary>
# Which precision needs no master copy, and why?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# Nothing: a dict from optimizer to bytes is enough.
# </details>


# %% exercise="3.1"
def model_state_bytes(num_parameters: int, precision: str, optimizer: str) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state with its master copy."""
    # SOLUTION
    width, master = (4, 0) if precision == "fp32" else (2, 4)
    kept = {"sgd": 0, "momentum": 4, "lion": 4, "adam": 8, "adamw": 8, "adamw8bit": 2}[optimizer]
    return num_parameters * width, num_parameters * width, num_parameters * (master + kept)
    # END SOLUTION


# %%
labkit.check("3.1")

# %%
state_bytes, note = mine_or(model_state_bytes, lab03.pictures.by_convention)
note = note and f" ({note})"
settings = [("fp32", "adamw"), ("bf16", "adamw"), ("bf16", "lion"), ("bf16", "adamw8bit"), ("bf16", "sgd")]
sizes = [state_bytes(10**9, *setting) for setting in settings]
stacks = [dict(zip(("parameters", "gradients", "optimizer"), each, strict=True)) for each in sizes]
ax = explorer.stacked(stacks, ["\n".join(setting) for setting in settings], f"states of a billion parameters{note}")
plt.show()
one_billion = sum(state_bytes(10**9, "bf16", "adamw")) / 1e9
states_guess.reveal(one_billion)
Markdown(f"**{one_billion:g} GB, {one_billion / 2:g} times the weights, and mixed precision saves nothing of it: fp32 has {sum(state_bytes(10**9, 'fp32', 'adamw')) / 1e9:g} GB too.**{note}")

# %%
for convention in states.CONVENTIONS:
    each = states.per_parameter(convention, "bf16", stage=2)
    print(f"{convention:10}{each.total} bytes a parameter ({each.source})")
model_size, gpus = 2_851_000_000, 8
documented, in_code = states.deepspeed_zero2_before(model_size, gpus), states.deepspeed_zero2(model_size, gpus, offload=False)[1]
# ZeRO-2 (lab 04) divides gradients and optimizer among GPUs; a parameter's bytes on each, with 2.85 billion of them:
print(f"ZeRO-2, {gpus} GPUs, documented: 4 + 16/{gpus} = {documented / model_size:.2f} bytes a parameter, {documented / 2**30:.2f} GiB")
print(f"ZeRO-2, {gpus} GPUs, in its code: 2 + 18/{gpus} = {in_code / model_size:.2f} bytes a parameter, {in_code / 2**30:.2f} GiB")

# %% [markdown]
# A figure without its convention is half a figure: Megatron-LM keeps gradients in fp32, DeepSpeed's estimators count a copy more, and DeepSpeed's documentation still prints the formula that its code had before 2024.
#
# ## 2 · What forward leaves behind
# States do not depend on the batch. The rest does: backward needs what forward computed. torch hands every tensor that it keeps through a hook, so they can be counted.
#
# **Question.** The same small Llama, a batch twice as large: by how much does the peak grow, in percent?

# %%
batch_guess = labkit.predict("3.batch", ..., "%")

# %%
kept = {}


def note_it(tensor):
    kept[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


model, (tokens, targets) = Llama(Shape(layers=4)), next(batches(4, 128, steps=1))
with torch.autograd.graph.saved_tensors_hooks(note_it, lambda tensor: tensor):
    loss_of(model(tokens), targets)
own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
saved = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own)
twice = lab03.record_step(8, 128)
batch_guess.reveal(100 * (twice.held.peak_bytes / plain.held.peak_bytes - 1))
Markdown(f"**{len(kept)} storages kept, {saved / 1e6:.1f} MB without the weights; twice the batch makes the peak {twice.held.peak_bytes / plain.held.peak_bytes:.2f} times as high.**")

# %% [markdown]
# Which tensors? One layer, on 2 sequences of 32 tokens, in bf16: what is kept, and whose backward needs it.

# %%
small = lab03.pictures.SMALL
print(lab03.table(lab03.of_layer(lab03.llama_keeps(small, 2, 32, element_bytes=2))))

# %% [markdown]
# `mul` keeps both factors, a matrix product its input, attention its queries, keys, values, output and one number a query and head (*flash*: no scores). The norm computes in fp32. In bf16 each layer also converts cosines and sines, for queries and keys.
#
# Papers count more simply: every operation keeps its input, all in one width, nothing small. For GPT's layer in 2 bytes that is *s b h* (34 + 5 *a s* / *h*), with *a* heads ([Korthikanti et al.](https://arxiv.org/abs/2205.05198)).

# %% [markdown]
# **Exercise 3.2: what a layer keeps** (12 min, core)
#
# Bytes of *one* layer. shape has hidden, heads, kv_heads, head_dim, ffn, gated; element_bytes is 2 or 4.
#
# - "megatron": where `shape.gated` is False, GPT's formula as it stands above, for 2 bytes and with the scores. Else Llama's layer with flash attention, element_bytes an element: inputs of both norms, of the first matrices behind them, of the output matrix; queries, keys, values; four tensors of the MLP.
# - "eager": what the table shows (Llama's layer, flash), within 1% of what autograd holds live.
#
# <details><summary>Hint 1: a question</summary>
# Which lines of the table change in fp32? (Run it with element_bytes=4.) Which shapes have kv_heads in them?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>repeat_interleave</code> in <code>labkit/model/llama.py</code>: what does attention get to see?
# </details>


# %% exercise="3.2"
def activation_bytes(shape, batch: int, seq: int, element_bytes: int, convention: str) -> float:
    """Bytes that one layer keeps for its backward, by convention "megatron" or "eager"."""
    # SOLUTION
    tokens, e, h, f = batch * seq, element_bytes, shape.hidden, shape.ffn
    if convention == "megatron" and not shape.gated:
        return tokens * (34 * h + 5 * shape.heads * seq)
    if convention == "megatron":
        return tokens * e * (6 * h + 2 * shape.kv_heads * shape.head_dim + 4 * f)
    norms = 2 * (4 * h + 4 + 2 * e * h)  # input in fp32, 1/rms, normalised, output
    attention = 4 * e * h + 4 * shape.heads  # queries, keys and values repeated, output; log-sum-exp
    angles = 8 * seq * shape.head_dim if e == 2 else 0
    return tokens * (norms + attention + 4 * e * f) + angles
    # END SOLUTION


# %%
labkit.check("3.2")

# %%
count, note_2 = mine_or(activation_bytes, lab03.pictures.by_the_table)
note_2 = note_2 and f" ({note_2})"
widths = {"bf16": 2, "fp32": 4}
rows = {name: [count(small, 2, 128, e, name) / 1e3 for e in widths.values()] for name in ("megatron", "eager")}
rows["autograd, live"] = [lab03.layer_bytes(small, 2, 128, e) / 1e3 for e in widths.values()]
ax = curves.bars(list(rows.items()), list(widths), "kB a layer", f"2 x 128 tokens, hidden 128{note_2}")
plt.show()
llama = named("llama-3.2-1b")
per_sequence = {name: llama.layers * count(llama, 1, 4096, 2, name) / 1e9 for name in ("megatron", "eager")}
Markdown(f"**One sequence of 4096 tokens in Llama 3.2 1B: {per_sequence['megatron']:.1f} GB in the layers by the papers, {per_sequence['eager']:.1f} GB as torch runs it unfused, beside {sum(state_bytes(shapes.parameters(llama), 'bf16', 'adamw')) / 1e9:.1f} GB of states.**{note_2}")

# %%
# Fused kernels are what lies between the two. Formula beside record, for the small model's whole step:
layout = Layout(seq=128, micro_batch=4, precision="fp32", activations="eager")
whole = memory.memory(shapes.Shape("small", 4, 128, 4, 2, 32, 344, 256), layout)
seen = plain.held
formula = [whole.parameters, whole.gradients, whole.optimizer, sum(memory.activation_bytes(shapes.Shape("small", 4, 128, 4, 2, 32, 344, 256), layout, 0))]
recorded = [seen.begin["parameter"], max(seen.by_kind["gradient"]), seen.begin["optimizer"], seen.peak["activation"] + seen.peak["temporary"]]
names = ["parameters", "gradients", "optimizer", "activations\nand the loss"]
series = [("formula", [size / 1e6 for size in formula]), ("recorded", [size / 1e6 for size in recorded])]
ax = curves.bars(series, names, "MB", "4 x 128 tokens, fp32")

# %% [markdown]
# Who holds most at the peak? A first thing to ask when memory runs out. The same model with a vocabulary of 8192, which is small today. Lines of `recorded.py` are forward and backward of the lab's step; the loss belongs to no module:

# %%
wordy = lab03.record_step(4, 128, vocab=8192)
ax = held.owners(wordy.owners, "at the peak of a step with 8192 tokens in the vocabulary", most=6)
plt.show()
at_loss = sum(owner.num_bytes for owner in wordy.owners if not owner.module and owner.kind in ("activation", "temporary"))
Markdown(f"**The loss alone holds {at_loss / 1e6:.0f} of {wordy.held.peak_bytes / 1e6:.0f} MB: the log-softmax, its gradient, and that of the logits, in fp32.**")

# %% [markdown]
# ### Broken on purpose: an evaluation that remembers
# The mean loss of a few batches, without backward. Before you run it: what will the curve of bytes look like?


# %%
def evaluate(careful):
    model, total = Llama(Shape(layers=4)), 0.0
    with labkit.Trace() as trace, torch.set_grad_enabled(not careful):
        for tokens, targets in batches(4, 128, steps=4):
            total = total + loss_of(model(tokens), targets)
    return trace.record


left, right = plot.side_by_side(2, width=4.6, height=2.6)
sums, careful = (bytes_held(labkit.launch(evaluate, 1, way, prints="quiet")[0]) for way in (False, True))
for ax, seen_bytes, title in ((left, sums, "total + loss"), (right, careful, "under no_grad")):
    held.over_time(seen_bytes, title, ax).set_ylim(0, 1.15 * sums.peak_bytes / 1e6)
left.get_legend().remove()

# %% [markdown]
# Each loss holds its graph, and the sum holds each loss, until memory runs out. `no_grad` keeps nothing; in training take `loss.item()`.

# %% [markdown]
# ## 3 · Compute it again
# A *checkpointed* layer keeps only its input. In backward its forward runs once more, and what it needs is there for that layer's turn.
#
# **Question.** All layers checkpointed: by how many percent do the FLOPs of a step grow?

# %%
again_guess = labkit.predict("3.again", ..., "%")

# %%
again = lab03.record_step(4, 128, checkpoint="all")
left, right = plot.side_by_side(2, width=4.6, height=2.8)
top = 1.15 * plain.held.peak_bytes / 1e6
for ax, step, title in ((left, plain, "no checkpoints"), (right, again, "every layer checkpointed")):
    held.over_time(step.held, title, ax).set_ylim(0, top)
left.get_legend().remove()
plt.show()
again_guess.reveal(100 * (again.flops / plain.flops - 1))
Markdown(f"**The small Llama, every layer checkpointed: peak {again.held.peak_bytes / plain.held.peak_bytes:.0%}, activations {again.held.peak['activation'] / plain.held.peak['activation']:.0%}, for {again.flops / plain.flops - 1:.0%} more FLOPs.**")

# %% [markdown]
# A forward is a third of a step; the head is not recomputed, and torch stops once it has what it needs. Does time follow?

# %%
t4 = hardware.cluster("T4", per_node=1)
replayed = [replay([step.record], prices(t4)).time_s for step in (plain, again)]
clock = lab03.time_steps(("none", "all"))
ratios = [again.flops / plain.flops, replayed[1] / replayed[0], clock[1] / clock[0]]
ax = curves.bars([("", ratios)], ["FLOPs", "replayed, T4", "clock, here"], "times", "a step with recomputation, over one without")

# %% [markdown]
# Often only some layers need it. Try the last one alone:

# %%
last = lab03.record_step(4, 128, checkpoint="last")
Markdown(f"**The last layer checkpointed: {last.flops / plain.flops - 1:.1%} more FLOPs, and a peak only {1 - last.held.peak_bytes / plain.held.peak_bytes:.1%} lower, though it is one of {last.sizes['layers']} equal layers.**")

# %% [markdown]
# It is recomputed at once, when all others are still held. Backward frees from the end: *when* a layer's turn comes decides what is held beside it.
#
# **Exercise 3.3: compute it again** (15 min, hard)
#
# Run `layers` one after the other on x, some under `checkpoint(layer, x, use_reentrant=False)`, and return the last output. `costs` has (kept_bytes, input_bytes, forward_flops) of each: what it keeps, input included; what it keeps checkpointed; what its second forward costs. The most bytes that are kept at any layer's turn in backward, its own all back, must be at most budget_bytes. Of all choices that fit (there is one), recompute the fewest FLOPs.
#
# <details><summary>Hint 1: a question</summary>
# At layer i's turn, what do layers before it hold, what does it hold itself, and those behind it?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>itertools.product((False, True), repeat=len(layers))</code>: six layers have 64 choices.
# </details>


# %% exercise="3.3"
def choose_checkpoints(layers: list, x: torch.Tensor, costs: list, budget_bytes: int) -> torch.Tensor:
    """The last layer's output; checkpointed layers fit the budget with the least recomputation."""
    # SOLUTION
    import itertools

    best = float("inf"), None
    for chosen in itertools.product((False, True), repeat=len(layers)):
        held_before = peak_bytes = flops = 0
        for (kept, inputs, forward), again in zip(costs, chosen, strict=True):
            peak_bytes = max(peak_bytes, held_before + kept)
            held_before += inputs if again else kept
            flops += forward * again
        if peak_bytes <= budget_bytes and flops < best[0]:
            best = flops, chosen
    for layer, again in zip(layers, best[1], strict=True):
        x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
    return x
    # END SOLUTION


# %%
labkit.check("3.3")

# %%
choose, note_3 = mine_or(choose_checkpoints, lab03.pictures.everything_again, "all layers")
note_3 = note_3 and f" ({note_3})"
ways, flops_again, peaks = zip(*lab03.pictures.checkpoint_picture(choose), strict=True)
left, right = plot.side_by_side(2, width=4.4, height=2.6)
ax = curves.bars([("", peaks)], ways, "kB of activations", f"most held, recorded{note_3}", left)
curves.limit(ax, lab03.pictures.LAYERS_BUDGET / 1e3, f"budget {lab03.pictures.LAYERS_BUDGET / 1e3:.0f} kB", at=1)
ax = curves.bars([("", flops_again)], ways, "MFLOPs", "recomputed", right)
plt.show()
Markdown(f"**Budget {lab03.pictures.LAYERS_BUDGET / 1e3:.0f} kB: {peaks[2]:.0f} kB held with {flops_again[2]:.1f} MFLOPs again; all layers would cost {flops_again[1]:.1f}.**{note_3}")

# %% [markdown]
# torch's own answer to this exercise is the *memory budget* of `torch.compile`; by hand, people checkpoint every layer, or every other one.
#
# ## 4 · Sixteen bits
# Activations halve in 16 bits. bf16 has the range of fp32; fp16 ends at 65504; its smallest number is 2⁻²⁴, and what is below half of it becomes 0. What is that small? The gradient of the logits: a vocabulary of 128,256, a mean over 8192 tokens.
#
# **Question.** How many percent of these gradients does fp16 turn into 0?

# %%
lost_guess = labkit.predict("3.lost", ..., "%")

# %%
small_ones = lab03.pictures.logit_gradient(128_256, 8192)
powers = range(33)
zero, infinite = zip(*(lab03.pictures.lost(small_ones, 2.0**power) for power in powers), strict=True)
ax = curves.lines([("become 0", powers, [100 * share for share in zero], "line")], "loss multiplied by 2 to the", "% of logits' gradients", "fp16")
top = next(power for power, share in zip(powers, infinite, strict=True) if share)
ax.axvline(top, color=plot.COLOURS["ink"], linestyle="--", label="the first infinite")
ax.legend(fontsize=8, frameon=False)
plt.show()
lost_guess.reveal(100 * zero[0])
Markdown(f"**{zero[0]:.2%} become 0. A loss multiplied by 65,536 loses {zero[16]:.2%}; multiplied by 2 to the {top} the largest are infinite. In bf16 {lab03.pictures.lost(small_ones, 1.0, 'bfloat16')[0]:.2%} are lost, without any scale.**")

# %% [markdown]
# So multiply the loss, and divide the gradients before the step. By how much? Raise the scale while all is finite; after an overflow lower it.
#
# **Exercise 3.4: small numbers in sixteen bits** (10 min, core)
#
# `scale_loss(loss)` multiplies by the attribute `scale`. `step(optimizer)`, after backward:
#
# - If any gradient, in any parameter group, *on any rank*, is inf or nan, nobody steps; scale *= backoff_factor, but not below min_scale.
# - Else gradients are divided by scale and the optimizer steps. After growth_interval of these in a row, scale *= growth_factor, and the count starts anew.
#
# Returns whether it stepped. Ranks have gradients of their own, as under ZeRO: only a flag travels.
#
# <details><summary>Hint 1: a question</summary>
# If one rank skips and another steps, what have they in common afterwards? Which ranks must call all_reduce?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>Tensor.isfinite</code>; <code>optimizer.param_groups</code>; <code>dist.ReduceOp.MAX</code>. Some <code>.grad</code> may be None.
# </details>


# %% exercise="3.4"
class DynamicLossScaler:
    """Multiplies the loss so that small gradients survive fp16; skips a step that overflowed on any rank."""

    def __init__(self, scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0):
        # SOLUTION
        self.scale, self.min_scale, self.good_steps = scale, min_scale, 0
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        # END SOLUTION

    def scale_loss(self, loss):
        # SOLUTION
        return loss * self.scale
        # END SOLUTION

    def step(self, optimizer):
        # SOLUTION
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        overflow = torch.tensor(0.0 if all(grad.isfinite().all() for grad in grads) else 1.0)
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if overflow:
            self.scale, self.good_steps = max(self.scale * self.backoff_factor, self.min_scale), 0
            return False
        for grad in grads:
            grad /= self.scale
        optimizer.step()
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * self.growth_factor, 0
        return True
        # END SOLUTION


# %%
labkit.check("3.4")

# %%
def train(steps, rows, Scaler=None):
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, seen = Llama(Shape(hidden=64, layers=1, ffn=172)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = Scaler and Scaler(scale=2.0**24, growth_interval=6)
    for tokens, targets in batches(rows, 64, rank=rank, world_size=n, steps=steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            loss = loss_of(model(tokens), targets)
        (scaler.scale_loss(loss) if scaler else loss).backward()
        for parameter in model.parameters():  # averaged, an overflow is on both ranks; under ZeRO it is not
            dist.all_reduce(parameter.grad.div_(n))
        took = scaler.step(optimizer) if scaler else optimizer.step()
        seen.append((loss.item(), took, scaler.scale if scaler else 1.0))
    return seen


# %%
Scaler, note_4 = mine_or(DynamicLossScaler, lab03.pictures.TorchScaler, "torch's")
note_4 = note_4 and f" ({note_4})"
wide = [loss for loss, *_ in labkit.launch(train, 1, 30, 8, prints="quiet", backend="gloo")[0]]
half = labkit.launch(train, 2, 30, 4, Scaler, prints="quiet", backend="gloo")
losses = [(one[0] + other[0]) / 2 for one, other in zip(*half, strict=True)]
left, right = plot.side_by_side(2, width=4.4, height=2.6)
series = [("fp32, one rank", range(30), wide, "line"), ("fp16, two ranks", range(30), losses, "points")]
ax = curves.lines(series, "step", "nats per byte", "same start, same rows", left, from_zero=False)
powers = [torch.tensor(scale).log2() for *_, scale in half[0]]
ax = curves.lines([("", range(30), powers, "points")], "step", "log2 of the scale", f"the loss scale{note_4}", right, from_zero=False)
plt.show()
skipped = sum(took is False for _, took, _ in half[0])
Markdown(f"**{skipped} of 30 steps skipped, on both ranks; the loss ends at {losses[-1]:.2f}; in fp32, after as many steps taken, at {wide[-1 - skipped]:.2f}.**{note_4}")

# %% [markdown]
# A published configuration says `"initial_scale_power": 32`. With a largest gradient of 1/8, how many steps are skipped?

# %%
scales, skips = lab03.pictures.too_high(Scaler, 32)
ax = curves.lines([("", range(40), [torch.tensor(scale).log2() for scale in scales], "points")], "step", "log2 of the scale", f"from 2 to the 32{note_4}", from_zero=False)
plt.show()
Markdown(f"**{skips} steps: each halves the scale, until an eighth of it is below 65504.** They read data, compute, and change nothing.")

# %% [markdown]
# ## 5 · What no tensor holds
# On a GPU more is taken than tensors have. The *CUDA context* (kernels, libraries) is some hundred MiB a process. And torch's allocator keeps what was freed, for the next request of a size that fits. A model of it, with batches whose lengths change:

# %%
events = lab03.gaps.batches_of_changing_length()
usual, growing = (lab03.gaps.filled(events, expandable) for expandable in (False, True))
series = [("allocated", range(len(events)), [size / 2**20 for size in usual.allocated], "line")]
series += [(name, range(len(events)), [size / 2**20 for size in each.reserved], "line") for name, each in (("reserved", usual), ("reserved, expandable", growing))]
ax = curves.lines(series, "tensors made and freed", "MiB", "a caching allocator")
ax.legend(fontsize=8, frameon=False, loc="upper left")
ax.set_ylim(0, 1.4 * usual.reserved[-1] / 2**20)  # room for the legend
plt.show()
Markdown(f"**{usual.reserved[-1] / 2**20:.0f} MiB reserved for at most {max(usual.allocated) / 2**20:.0f} allocated: gaps of every size, none of them large enough. One segment that can grow: {growing.reserved[-1] / 2**20:.0f}.**")

# %% [markdown]
# The message of an out-of-memory error has the figures that tell gaps from a real shortage. Two of them, on a card of 40 GB: one with the share of gaps of a reported case, one with another's 25 MiB:

# %%
message = "CUDA out of memory. Tried to allocate {} MiB. GPU 0 has a total capacity of 39.39 GiB of which {} MiB is free. Of the allocated memory {} GiB is allocated by PyTorch, and {} is reserved by PyTorch but unallocated."
gaps = 38.1 * (16.39 - 10.83) / 16.39  # of 16.39 GiB reserved, 10.83 were enough without gaps
for figures in ((896, 120, f"{38.1 - gaps:.2f}", f"{gaps:.2f} GiB"), (512, 120, "38.10", "25.00 MiB")):
    print(message.format(*figures), "\n  ->", lab03.oom.read_oom(message.format(*figures)).sentence)
processes = [(0, 100, 26167.0), *[(0, 100 + rank, 871.0) for rank in range(1, 8)], *[(rank, 100 + rank, 25290.0) for rank in range(1, 8)]]
strays = lab03.oom.strays(processes)
print(f"nvidia-smi, 8 ranks: {len(strays)} of them have a context on GPU 0 as well, {sum(mib for *_, mib in strays) / 1024:.1f} GiB")
print(allocated().sentence() if torch.cuda.is_available() else "no GPU here: no allocator to ask")

# %% [markdown]
# The last one is GPU 0 fuller than the others: a rank that touches CUDA before `torch.cuda.set_device(local_rank)`, or loads a file without `map_location`, makes a context there.
#
# ## 6 · Any model, any layout
# Stacked bars against a device; for the recorded model the record stands below. What is the least change that fits Llama 3.1 8B on one H100? And the 70B on eight?

# %%
explorer.memory(recorded=plain)

# %%
Markdown(lab03.fits.answers())

# %% [markdown]
# ZeRO divides states by dp (lab 04); tp divides both. What three articles on DeepSpeed say about memory, computed:

# %%
Markdown(lab03.claims.table(lab03.claims.claims(skips)))

# %% [markdown]
# ## 7 · The same in torch and DeepSpeed
#
# ```
# labkit run lab03.step checkpoint=all
# deepspeed --num_gpus 8 train.py --deepspeed_config ds_config.json
# ```
#
# On a GPU, in your script, around a step; pytorch.org/memory_viz draws the file:
#
# ```python
# torch.cuda.memory._record_memory_history()
# ...  # a step
# torch.cuda.memory._dump_snapshot("step.pickle")
# ```
#
# In `ds_config.json`: `"bf16": {"enabled": true}`, or `"fp16"` with `initial_scale_power`, `loss_scale_window`, `hysteresis`, `min_loss_scale`. Its `activation_checkpointing` section does nothing by itself: the model has to call it.
#
# | you wrote | torch and DeepSpeed have | remember |
# |---|---|---|
# | `model_state_bytes` | `estimate_zero2_model_states_mem_needs` | say the convention with the figure |
# | `activation_bytes` | `torch.cuda.memory._snapshot`, `saved_tensors_hooks` | states are fixed, activations go with tokens |
# | `choose_checkpoints` | `torch.utils.checkpoint`, `torch.compile`'s memory budget | the order of backward decides |
# | `DynamicLossScaler` | `torch.amp.GradScaler`, DeepSpeed's `DynamicLossScaler` | one rank's overflow is everyone's |
#
# **An open question.** Twelve of the sixteen bytes are the optimizer's, and each of four ranks has the same ones. Must it? Lab 04 takes them apart.
