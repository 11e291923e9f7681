# %% [markdown]
# # 06 Tensor parallel
#
# **How do you split one matrix product so that the network hears as little as possible?**
#
# About 100 minutes, after labs 01 and 03; two hard exercises take 45 more. No GPU: real ranks share a small Llama.

# %%
from statistics import median
from time import monotonic
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from IPython.display import Markdown

from labkit.check.check import mine_or
from labkit.cost import comm, hardware, laptop
from labkit.cost.groups import on_cluster
from labkit.cost.named import named
from labkit.cost.shapes import attention_parameters
from labkit.cost.tensor_claims import claims
from labkit.cost.tensor_parallel import layer_time, llama_like
from labkit.labs import lab02, lab06
from labkit.labs.lab06 import engines, pictures, shares, standins, torchs
from labkit.model.deepspeed import import_deepspeed
from labkit.model.fake import llama_shape
from labkit.model.llama import MLP, Layer, Shape, rotary, rotate
from labkit.record.laptop import laptop as this_laptop
from labkit.record.prices import prices
from labkit.record.replay import replay
from labkit.view import curves, cut, plot, tensor

# %% [markdown]
# **Where this hour leads.** The matrices of one layer, drawn to scale, on four ranks. A colour is what a rank keeps, and all that it computes with. Ranks talk at f and at g (section 3), and not between.

# %%
ax = cut.layer(named("llama-3.1-8b"), 4, "one layer of llama-3.1-8b on 4 ranks; inputs down, outputs across")

# %% [markdown]
# ## 1 · One worker, and two ways to cut its products
# Data parallel ranks had different rows and the same weights. Here all ranks see the *same* rows, and each has a part of every matrix.
#
# y = x A can be cut by *columns*: a rank has some columns of A and gets some columns of y. Or by *rows*: it has some rows of A, needs only these columns of x, and gets a *summand* of y.

# %%
serial = lab06.serial(steps=10)
x, A = torch.tensor([[1, 2, 3, 4]]), torch.arange(16).view(4, 4) % 5
print("x A       ", (x @ A).tolist()[0])
print("by columns", [(x @ part).tolist()[0] for part in A.chunk(2, dim=1)])
print("by rows   ", [(some @ part).tolist()[0] for some, part in zip(x.chunk(2, dim=1), A.chunk(2), strict=True)])
Markdown(f"**Serial baseline: ten steps of a small Llama take the loss from {serial.losses[0]:.4f} to {serial.losses[-1]:.4f}.**")

# %% [markdown]
# ## 2 · Column, then row
# An MLP: `down(silu(gate(x)) * up(x))`. All by columns: gather the middle's columns, 3.5 times x's, then the result's. `down` by rows: its rank has them; one all_reduce.
#
# **Question.** How many times as many bytes does the first way send, forward?

# %%
ways_guess = labkit.predict("6.ways", ..., "times")  # your number in place of the dots

# %% [markdown]
# t ranks in `group`; rank r has block r of t equal ones. torch keeps A transposed: columns of A are *rows* of `linear.weight` (out, in). `weight` and `bias` (None without one) are parameters and copies: a view would keep the whole alive.
#
# **Exercise 6.1: columns** (5 min, easy). `ColumnParallelLinear(linear, group)`: x (..., in) to (..., out/t). Nothing is sent.
#
# **Exercise 6.1b: rows** (7 min, core). `RowParallelLinear(linear, group)`: x (..., in/t) to (..., out), by one all_reduce. The bias is whole, and counts once.
#
# <details><summary>Hint 1: a question</summary>
# The all_reduce adds up what all ranks put in. What becomes of a bias that is in there?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>weight.detach().chunk(t, dim)[rank].clone()</code>, <code>torch.nn.Parameter</code>, <code>F.linear</code>, <code>dist.all_reduce(..., group=group)</code>. On <code>y.detach()</code>, the same memory, it works unseen by autograd.
# </details>


# %% exercise="6.1"
class ColumnParallelLinear(torch.nn.Module):
    """This rank's columns of y = x A + b."""

    def __init__(self, linear, group):
        # SOLUTION
        super().__init__()
        t, rank = dist.get_world_size(group), dist.get_rank(group)
        self.weight = torch.nn.Parameter(linear.weight.detach().chunk(t)[rank].clone())
        bias = None if linear.bias is None else linear.bias.detach().chunk(t)[rank].clone()
        self.bias = None if bias is None else torch.nn.Parameter(bias)
        # END SOLUTION

    def forward(self, x):
        # SOLUTION
        return F.linear(x, self.weight, self.bias)
        # END SOLUTION

# %%
labkit.check("6.1")


# %% exercise="6.1b"
class RowParallelLinear(torch.nn.Module):
    """y = x A + b, of which this rank has some columns of x and rows of A."""

    def __init__(self, linear, group):
        # SOLUTION
        super().__init__()
        self.group, t, rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.weight = torch.nn.Parameter(linear.weight.detach().chunk(t, dim=1)[rank].clone())
        self.bias = None if linear.bias is None else torch.nn.Parameter(linear.bias.detach().clone())
        # END SOLUTION

    def forward(self, x):
        # SOLUTION
        y = F.linear(x, self.weight)
        dist.all_reduce(y.detach(), group=self.group)  # the same memory, unseen by autograd
        return y if self.bias is None else y + self.bias
        # END SOLUTION

# %%
labkit.check("6.1b")


# %%
def both_ways():
    torch.manual_seed(0)
    mlp, x, world = MLP(Shape(hidden=64, ffn=224)), torch.randn(2, 8, 64), dist.group.WORLD
    gate, up, by_columns = (Columns(linear, world) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    by_rows = Rows(mlp.down_proj, world)

    def joined(part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=-1)

    sent = []
    for last in (lambda middle: joined(by_columns(joined(middle))), by_rows):
        with torch.no_grad(), labkit.Trace() as trace:
            y = last(F.silu(gate(x)) * up(x))
        sent.append((trace.record.sent_bytes, (y - mlp(x)).abs().max().item()))
    return sent


(Columns, note_1), (Rows, note_2) = mine_or(ColumnParallelLinear, standins.ColumnParallelLinear), mine_or(RowParallelLinear, standins.RowParallelLinear)
(gathered_bytes, _), (summed_bytes, off) = labkit.launch(both_ways, 4, prints="quiet")[0]
ways_guess.reveal(gathered_bytes / summed_bytes)
Markdown(f"**{gathered_bytes:,} bytes, gathered twice, against {summed_bytes:,}: {gathered_bytes / summed_bytes:.2f} times. Column, then row; the result is serial's to {off:.0e}.** {note_1 or note_2}")

# %% [markdown]
# ## 3 · What backward must hear
# Forward is right. Now the gradient of the input, for the layers below: four ranks, the same MLP.
#
# **Question.** How far is rank 0's from the true one, in percent of that one's length?

# %%
without_guess = labkit.predict("6.without_f", ..., "%")


# %%
def input_gradient(enter):
    torch.manual_seed(0)
    mlp, x, world = MLP(Shape(hidden=64, ffn=224)), torch.randn(2, 8, 64, requires_grad=True), dist.group.WORLD
    due = torch.autograd.grad(mlp(x).square().sum(), x)[0]
    gate, up, down = Columns(mlp.gate_proj, world), Columns(mlp.up_proj, world), Rows(mlp.down_proj, world)
    cut = enter(x, world)
    found = torch.autograd.grad(down(F.silu(gate(cut)) * up(cut)).square().sum(), x)[0]
    return 100 * ((found - due).norm() / due.norm()).item()


without = labkit.launch(input_gradient, 4, lambda x, group: x, prints="quiet")
without_guess.reveal(without[0])
Markdown(f"**{without[0]:.0f}%, and no error: every rank has the gradient by way of its own columns only.**")

# %% [markdown]
# x went to all ranks, so its gradient is the *sum* over all: an all_reduce in backward. Megatron-LM (arXiv:1909.08053) names two functions, each the other's mirror. Neither changes what it is given.
#
# **Exercise 6.2: f** (6 min, core). `f(x, group)`: x as it is; in backward the sum over ranks of the gradients.
#
# **Exercise 6.2b: g** (6 min, core). `g(x, group)`: the sum over ranks of x; in backward the gradient as it is.
#
# <details><summary>Hint 1: a question</summary>
# After g all ranks have the same y, and compute the same loss from it. Is the gradient that reaches g a part, or whole?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>torch.autograd.Function</code> with <code>forward(ctx, x)</code> and <code>backward(ctx, grad)</code>; a gradient may be expanded: <code>grad.clone(memory_format=torch.contiguous_format)</code>.
# </details>


# %% exercise="6.2"
def f(x, group):
    """x; in backward the sum of all ranks' gradients."""
    # SOLUTION

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(grad, group=group)
            return grad

    return Copied.apply(x)
    # END SOLUTION

# %% exercise="6.2b"
def g(x, group):
    """The sum of all ranks' x; in backward the gradient as it is."""
    # SOLUTION

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            total = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Summed.apply(x)
    # END SOLUTION

# %%
labkit.check("6.2")

# %%
labkit.check("6.2b")

# %%
(enter, note_f), (leave, note_g) = mine_or(f, standins.f), mine_or(g, standins.g)
note_fg = f"({note_f or note_g})" if note_f or note_g else ""
linears = {"column": Columns, "row": Rows, "g": leave}
right = lab06.train(lab06.Parts(**linears, f=enter), tp=2, steps=10)
broken = lab06.train(lab06.Parts(**linears, f=lambda x, group: x), tp=2, steps=10)
three = [("serial", serial, "line"), ("with f", right, "points"), ("without f", broken, "dashed")]
series = [(name, range(1, 11), trained.losses, style) for name, trained, style in three]
ax = curves.lines(series, "step", "loss", f"a whole Llama on 2 ranks {note_fg}", from_zero=False)
plt.show()
apart = [abs(a - b) for a, b in zip(broken.losses, serial.losses, strict=True)]
off = max(abs(a - b) for a, b in zip(right.losses, serial.losses, strict=True))
Markdown(f"**With f: serial's losses to {off:.0e}. Without: step 1 is {apart[0]:.1g} off, step 10 {apart[-1]:.3f}, and the curve still falls.**")

# %% [markdown]
# Compare weights after some steps: one forward pass tells nothing.
#
# ## 4 · Heads
# A head is some columns of q, k and v, and some rows of o. Llama 3.1 8B has 32 for q, 8 for k and v; more ranks keep copies.

# %%
shape = named("llama-3.1-8b")
held = {t: t * attention_parameters(shape, t) / attention_parameters(shape) for t in (1, 2, 4, 8, 16, 32)}
ax = curves.bars([("", list(held.values()))], [f"{t} rank{'s' * (t > 1)}" for t in held], "times one copy", "attention of llama-3.1-8b, all ranks together")
plt.show()
Markdown(f"**{held[16]:g} times with 16 ranks, {held[32]:g} with 32: up to 8 ranks, one kv head or more each, nothing is kept twice.**")

# %% [markdown]
# A copy must *stay* one: ranks use their shared head for different queries, so each has a part of its gradient. Who sums parts in backward? f, also for a weight.
#
# **Exercise 6.3: attention by heads** (15 min, core)
#
# `ParallelAttention(attention, group, kv_group=None)`, in place of labkit's `Attention`. Parameters `q_proj.weight`, `k_proj.weight`, `v_proj.weight`, `o_proj.weight`: this rank's heads. With K kv heads for t > K ranks, rank r has head r·K//t, and `kv_group` (None where none share) holds those that share it: gradients of k and v are summed there. x passes f once.
#
# <details><summary>Hint 1: a question</summary>
# In <code>Attention.forward</code>, which line depends on how many heads there are?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>labkit.model.llama.Attention</code> (<code>??</code> shows it); <code>F.linear(x, f(weight, kv_group))</code>; <code>repeat_interleave(times, dim=1)</code>.
# </details>


# %% exercise="6.3"
class ParallelAttention(torch.nn.Module):
    """Attention of which this rank has some heads."""

    def __init__(self, attention, group, kv_group=None):
        # SOLUTION
        super().__init__()
        self.group, self.kv_group, self.head_dim = group, kv_group, attention.head_dim
        t, rank = dist.get_world_size(group), dist.get_rank(group)
        kv_parts = min(t, attention.k_proj.out_features // self.head_dim)  # t / kv_parts ranks have the same heads

        def part(linear, parts, dim=0):
            kept = linear.weight.detach().chunk(parts, dim)[rank * parts // t].clone()
            made = torch.nn.Linear(kept.shape[1], kept.shape[0], bias=False, device="meta")
            made.weight = torch.nn.Parameter(kept)
            return made

        self.q_proj, self.o_proj = part(attention.q_proj, t), part(attention.o_proj, t, dim=1)
        self.k_proj, self.v_proj = part(attention.k_proj, kv_parts), part(attention.v_proj, kv_parts)
        # END SOLUTION

    def forward(self, x, cos, sin):
        # SOLUTION
        weights = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
        if self.kv_group is not None:  # each rank of it uses the same kv head for other queries
            weights[1:] = [f(weight, self.kv_group) for weight in weights[1:]]
        x = f(x, self.group)
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in weights)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        served = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(served, dim=1), v.repeat_interleave(served, dim=1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return g(self.o_proj(o.transpose(1, 2).flatten(2)), self.group)
        # END SOLUTION

# %%
labkit.check("6.3")

# %% [markdown]
# ## 5 · The vocabulary
# The last matrix, `lm_head`, is widest: 128,256 columns in Llama 3. Each rank has some logits; the loss needs all:
#
# loss = log Σ exp(z − m) − (z of the target − m), with m the largest logit: three numbers per token.

# %% [markdown]
# **Exercise 6.4: rows of the embedding** (6 min, easy). `VocabParallelEmbedding(embedding, group)`: `weight` (vocab/t, h); tokens (b, s) to (b, s, h) by one all_reduce.
#
# **Exercise 6.4b: a loss from parts** (12 min, core). `vocab_parallel_cross_entropy(logits, targets, group)`: logits (b, s, vocab/t) of this rank, targets (b, s); gives the mean loss. Forward: all_reduces of b·s numbers (or 2·b·s); backward: none. Whole logits are never held.
#
# <details><summary>Hint 1: a question</summary>
# A token's row lies on one rank. What must the others give, so that the sum is right?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>index.where(mine, 0)</code>; <code>dist.ReduceOp.MAX</code>, of <code>logits.detach()</code>; <code>g</code> for both sums; <code>Tensor.gather</code>.
# </details>


# %% exercise="6.4"
class VocabParallelEmbedding(torch.nn.Module):
    """Looks up the tokens whose rows this rank has; the sum over ranks has all."""

    def __init__(self, embedding, group):
        # SOLUTION
        super().__init__()
        self.group, self.rank = group, dist.get_rank(group)
        rows = embedding.weight.detach().chunk(dist.get_world_size(group))[self.rank]
        self.weight = torch.nn.Parameter(rows.clone())
        # END SOLUTION

    def forward(self, tokens):
        # SOLUTION
        row = tokens - self.rank * len(self.weight)
        mine = (row >= 0) & (row < len(self.weight))
        found = F.embedding(row.where(mine, 0), self.weight)
        return g(found.where(mine.unsqueeze(-1), 0.0), self.group)
        # END SOLUTION

# %% exercise="6.4b"
def vocab_parallel_cross_entropy(logits, targets, group):
    """The mean loss; of the logits (b, s, vocab) this rank has (b, s, vocab / t)."""
    # SOLUTION
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits = logits - largest.unsqueeze(-1)
    column = targets - dist.get_rank(group) * logits.shape[-1]
    mine = (column >= 0) & (column < logits.shape[-1])
    of_target = logits.gather(-1, column.where(mine, 0).unsqueeze(-1)).squeeze(-1)
    total = g(logits.exp().sum(-1), group)
    return (total.log() - g(of_target.where(mine, 0.0), group)).mean()
    # END SOLUTION

# %%
labkit.check("6.4")

# %%
labkit.check("6.4b")

# %% [markdown]
# All of it together: a Llama on two ranks, and on four with two kv heads. Watch the gradients of the *input* too: at the embedding's output, they are right only if everything above is.


# %%
class CutMLP(torch.nn.Module):
    def __init__(self, mlp, group):
        super().__init__()
        self.gate, self.up, self.down = Columns(mlp.gate_proj, group), Columns(mlp.up_proj, group), Rows(mlp.down_proj, group)
        self.group = group

    def forward(self, x):
        x = enter(x, self.group)
        return self.down(F.silu(self.gate(x)) * self.up(x))


mine = [mine_or(ParallelAttention, standins.ParallelAttention), mine_or(VocabParallelEmbedding, standins.VocabParallelEmbedding)]
mine.append(mine_or(vocab_parallel_cross_entropy, standins.vocab_parallel_cross_entropy))
Heads, note_all = mine[0][0], next((f"({note})" for _, note in mine if note), note_fg)
parts = lab06.Parts(**linears, f=enter, attention=Heads, embedding=mine[1][0], cross_entropy=mine[2][0])
on_two, on_four = (lab06.train(parts, tp=t, steps=10) for t in (2, 4))
for trained in (on_two, on_four):
    print({what: f"{off:.0e}" for what, off in lab06.differences(trained, serial).items()})
print(pictures.calls_table(on_two))
gather = comm.sent_bytes("all_gather", 2 * shape.vocab, 8) / comm.sent_bytes("all_reduce", 3 * 4, 8)
Markdown(f"**Of two layers: two all_reduces forward and two backward each, one for the embedding, one before `lm_head`. Three numbers per token for the loss: Llama 3.1's logits, gathered in bf16 on 8 ranks, would be {gather:,.0f} times as many bytes.** {note_all}")

# %% [markdown]
# ### Random numbers
# After g all ranks hold the same x. Dropout there must drop the *same* elements everywhere.
#
# **Question.** Dropout of 10%, every rank with random numbers of its own: how many percent of x are equal on two ranks afterwards?

# %%
dropout_guess = labkit.predict("6.dropout", ..., "%")


# %%
def drawn_alone():
    torch.manual_seed(dist.get_rank())
    after = F.dropout(torch.ones(100_000), 0.1)  # the same x everywhere
    torch.manual_seed(0)
    shard = torch.randn(64, 16)  # a rank draws its columns of a new 64 x 64 matrix
    return after, shard


afters, shards = zip(*labkit.launch(drawn_alone, 4, prints="quiet"), strict=True)
equal = 100 * (afters[0] == afters[1]).float().mean().item()
dropout_guess.reveal(equal)
rank_of = torch.linalg.matrix_rank(torch.cat(shards, dim=1)).item()
Markdown(f"**{equal:.0f}% equal: ranks go on with different x, layer by layer, without an error. And with *one* seed, shards drawn by each rank are the same columns four times: a 64 x 64 matrix of rank {rank_of}.**")

# %% [markdown]
# So: one seed for all where ranks hold the same (after g, norms), a seed of its own between f and g (shards, dropout in a head). Megatron-LM keeps two random states for this. Or draw the whole matrix with one seed, then cut, as you did.
#
# ## 6 · What the network costs
# Nothing hides these all_reduces: the next product waits. One layer, forward and backward, on this machine: formula (products at this machine's speed, four all_reduces), replay, clock. Whatever else the machine does shows in the clock: run it again.


# %%
def layer_step(hidden, tokens, repeats):
    torch.manual_seed(0)
    shape, world = llama_shape(llama_like(hidden)), dist.group.WORLD
    layer, (cos, sin) = Layer(shape), rotary(tokens, shape.head_dim, shape.rope_theta)
    if dist.get_world_size() > 1:
        layer.self_attn, layer.mlp = Heads(layer.self_attn, world), CutMLP(layer.mlp, world)
    x, due, times = torch.randn(1, tokens, hidden, requires_grad=True), torch.randn(1, tokens, hidden), []
    layer(x, cos, sin).backward(due)
    with labkit.Trace() as trace:
        y = layer(x, cos, sin)
        middle_s = monotonic()
        y.backward(due)
    for _ in range(repeats):
        dist.barrier()
        began_s = monotonic()
        layer(x, cos, sin).backward(due)
        times.append(monotonic() - began_s)
    record = trace.record
    return record, sum(record.began_s + event.end_s <= middle_s for event in record.events), median(times or [0.0])


# %%
print("Measuring this machine, if that was not done before: some seconds ...", flush=True)
three = {"formula": [], "replay": [], "clock": []}
for n in (1, 2):
    mine, found = laptop.cluster_of(this_laptop(n)), labkit.launch(layer_step, n, 512, 512, 7, prints="quiet")
    formula = layer_time(llama_like(512), 512, 512, mine.node.device, on_cluster(mine), "fp32")
    three["formula"].append(1e3 * formula.time_s)
    three["replay"].append(1e3 * replay([record for record, *_ in found], prices(mine)).time_s)
    three["clock"].append(1e3 * max(time_s for *_, time_s in found))
ax = curves.bars(list(three.items()), ["1 rank", "2 ranks"], "ms", f"a layer of hidden 512, 512 tokens, this machine {note_all}")
plt.show()
faster = {name: before / after for name, (before, after) in three.items()}
Markdown(f"**Two ranks instead of one, times as fast: formula {faster['formula']:.2f}, replay {faster['replay']:.2f}, clock {faster['clock']:.2f}.**")

# %% [markdown]
# The formula has products and all_reduces; the replay also norms and residuals, which every rank does *whole*.
#
# **Question.** Hidden 1,024, 1,024 tokens, eight A100s on NVLink (300 GB/s). Four move to another node (25 GB/s per GPU). A layer takes how many times as long?

# %%
across_guess = labkit.predict("6.across", ..., "times")

# %%
print("Eight ranks, one layer ...", flush=True)
records, backward, _ = zip(*labkit.launch(layer_step, 8, 1024, 1024, 0, prints="quiet"), strict=True)
places = {"one node": hardware.cluster("DGX A100"), "two nodes": hardware.cluster("DGX A100", 2, per_node=4)}
places["10 GbE"] = hardware.cluster("DGX A100", 2, per_node=4, nic="10 GbE", num_nics=1)
on = {name: replay(records, prices(cluster, "tf32")) for name, cluster in places.items()}
lanes = [lane for name in ("one node", "two nodes") for lane in lab02.lanes(SimpleNamespace(backward=backward[0]), on[name], name)]
ax = plot.timeline(lanes, f"rank 0 of 8 A100, a layer of hidden 1024, 1024 tokens, replayed {note_all}")
plt.show()
across_guess.reveal(on["two nodes"].time_s / on["one node"].time_s)
spent = {name: f"{each.exposed_s(0) / each.time_s:.0%}" for name, each in on.items()}
formula = [layer_time(llama_like(1024), 1024, 1024, c.node.device, on_cluster(c), "tf32").share for c in places.values()]
print("share of communication:", spent, "by formula:", [f"{share:.0%}" for share in formula])
Markdown(f"**{on['two nodes'].time_s / on['one node'].time_s:.2f} times; over one card of 10 Gbit/s {on['10 GbE'].time_s / on['one node'].time_s:.0f} times. Tensor parallel stays inside a node.**")

# %% [markdown]
# The formula's share is higher: norms and residuals are free there. FLOPs grow with h², bytes with h, latency not at all: small models get *slower*. From which hidden size on do eight H100s beat one? What do two nodes change? Do more tokens help?

# %%
by_wire = {wire: [100 * each for each in found] for wire, found in shares.shares().items()}
title = f"a layer of llama-3.1-8b, {shares.TOKENS:,} tokens, H100s on one wire, replayed"
ax = curves.bars(list(by_wire.items()), [f"tp {degree}" for degree in shares.DEGREES], "% of the time communicating", title)
plt.show()
tensor.tensor()

# %% [markdown]
# ## 7 · The sequence, cut too
# Between g and the next f all ranks do and keep the same: norms, residuals. *Sequence parallel* (arXiv:2205.05198) gives each s/t positions there: an all_gather where f was, a reduce_scatter where g was, together one all_reduce.
#
# **Exercise 6.5: sequence parallel** (20 min, hard)
#
# `SequenceParallelMLP(norm, mlp, group, keep=True)`: x (b, s/t, h), this rank's positions, to those of `mlp(norm(x))`. Parameters: `norm_weight` whole; `gate`, `up` (ffn/t, h); `down` (h, ffn/t).
#
# - Norm on the part, gather, MLP on shards, scatter; the mirror in backward. The norm's gradient is summed over ranks.
# - `keep=False`: only the part is kept for backward, and gathered again there.
#
# <details><summary>Hint 1: a question</summary>
# Which tensor does backward of <code>gate</code> and <code>up</code> need, and who decides what autograd keeps?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# A <code>torch.autograd.Function</code> that gathers <i>and</i> multiplies: <code>ctx.save_for_backward</code> of the part alone; <code>F.rms_norm</code>; <code>f</code> on the norm's weight.
# </details>


# %% exercise="6.5"
class SequenceParallelMLP(torch.nn.Module):
    """mlp(norm(x)) of which every rank has some positions before and after, and some columns in between."""

    def __init__(self, norm, mlp, group, keep=True):
        # SOLUTION
        super().__init__()
        self.group, self.keep, self.eps = group, keep, norm.eps
        t, rank = dist.get_world_size(group), dist.get_rank(group)

        def part(linear, dim):
            return torch.nn.Parameter(linear.weight.detach().chunk(t, dim)[rank].clone())

        self.norm_weight = torch.nn.Parameter(norm.weight.detach().clone())
        self.gate, self.up, self.down = part(mlp.gate_proj, 0), part(mlp.up_proj, 0), part(mlp.down_proj, 1)
        # END SOLUTION

    def forward(self, x):
        # SOLUTION
        group, keep, t = self.group, self.keep, dist.get_world_size(self.group)

        def gathered(x):
            parts = [torch.empty_like(x) for _ in range(t)]
            dist.all_gather(parts, x.contiguous(), group=group)
            return torch.cat(parts, dim=1)

        def scattered(x):
            parts = [part.contiguous() for part in x.chunk(t, dim=1)]
            mine = torch.empty_like(parts[0])
            dist.reduce_scatter(mine, parts, group=group)
            return mine

        class Enter(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, *weights):
                full = gathered(x)
                ctx.save_for_backward(full if keep else x, *weights)
                return tuple(F.linear(full, weight) for weight in weights)

            @staticmethod
            def backward(ctx, *grads):
                kept, *weights = ctx.saved_tensors
                full = kept if keep else gathered(kept)
                back = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
                return scattered(back), *(grad.flatten(0, 1).T @ full.flatten(0, 1) for grad in grads)

        class Leave(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return scattered(x)

            @staticmethod
            def backward(ctx, grad):
                return gathered(grad)

        x = F.rms_norm(x, x.shape[-1:], f(self.norm_weight, group), self.eps)
        gate, up = Enter.apply(x, self.gate, self.up)
        return Leave.apply(F.linear(F.silu(gate) * up, self.down))
        # END SOLUTION

# %%
labkit.check("6.5")

# %% [markdown]
# Long texts need attention over positions that lie elsewhere. *Ring attention* (arXiv:2310.01889): k and v go round; a rank adds up what it sees. Let m be the largest score so far: sums of exp(score − m) can be rescaled when a larger one comes.
#
# **Exercise 6.6: round the ring** (25 min, hard)
#
# `ring_attention(q, k, v, group)`, each (b, heads, s/n, d): causal attention, n ranks: of 2n chunks, rank r has r and 2n−1−r. Messages to the right neighbour only: k and v, n−1 times; in backward their gradients too. Blocks that the mask empties are not computed.
#
# <details><summary>Hint 1: a question</summary>
# Why two chunks? With one, how many blocks has the first rank, and how many the last?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>dist.batch_isend_irecv</code>, <code>dist.get_global_rank</code>; <code>torch.logaddexp</code>; FlashAttention (arXiv:2205.14135), appendix B: backward needs the output and one number per row, log Σ exp.
# </details>


# %% exercise="6.6"
def ring_attention(q, k, v, group):
    """Causal attention (b, heads, s / n, d); this rank has chunks r and 2n - 1 - r of 2n."""
    # SOLUTION
    n, rank, half = dist.get_world_size(group), dist.get_rank(group), q.shape[2] // 2
    right, left = (dist.get_global_rank(group, (rank + step) % n) for step in (1, -1))

    def passed_on(tensors):
        mine = [each.contiguous() for each in tensors]
        theirs = [torch.empty_like(each) for each in mine]
        calls = [dist.P2POp(dist.isend, each, right, group) for each in mine]
        calls += [dist.P2POp(dist.irecv, each, left, group) for each in theirs]
        for work in dist.batch_isend_irecv(calls) if n > 1 else ():
            work.wait()
        return theirs if n > 1 else mine

    def blocks(owner):  # of my two chunks and the owner's two, those that the mask does not empty
        for i, mine in enumerate((rank, 2 * n - 1 - rank)):
            for j, other in enumerate((owner, 2 * n - 1 - owner)):
                if other <= mine:
                    yield slice(i * half, (i + 1) * half), slice(j * half, (j + 1) * half), other == mine

    def scores(q, k, masked):
        found = q @ k.mT * q.shape[-1] ** -0.5
        return found.masked_fill(torch.ones_like(found, dtype=torch.bool).triu(1), -torch.inf) if masked else found

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -torch.inf)
            held = k, v
            for hop in range(n):
                for a, b, masked in blocks((rank - hop) % n):
                    found, before = scores(q[:, :, a], held[0][:, :, b], masked), lse[:, :, a]
                    now = torch.logaddexp(before, found.logsumexp(-1, keepdim=True))
                    out[:, :, a] = out[:, :, a] * (before - now).exp() + (found - now).exp() @ held[1][:, :, b]
                    lse[:, :, a] = now
                if hop < n - 1:
                    held = passed_on(held)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, grad):
            q, k, v, out, lse = ctx.saved_tensors
            dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
            along = (grad * out).sum(-1, keepdim=True)
            for hop in range(n):
                for a, b, masked in blocks((rank - hop) % n):
                    p, due = (scores(q[:, :, a], k[:, :, b], masked) - lse[:, :, a]).exp(), grad[:, :, a]
                    ds = p * (due @ v[:, :, b].mT - along[:, :, a]) * q.shape[-1] ** -0.5
                    dq[:, :, a] += ds @ k[:, :, b]
                    dk[:, :, b] += ds.mT @ q[:, :, a]
                    dv[:, :, b] += p.mT @ due
                if hop < n - 1:
                    k, v, dk, dv = passed_on((k, v, dk, dv))
            return dq, *passed_on((dk, dv))

    return Ring.apply(q, k, v)
    # END SOLUTION

# %%
labkit.check("6.6")

# %%
Sequence, note_5 = mine_or(SequenceParallelMLP, standins.SequenceParallelMLP)
variants = pictures.variants(Sequence, parts, tp=4)
print(pictures.variants_table(variants), pictures.FORMULA, sep="\n\n")
left, right = plot.side_by_side(2, width=4.6, height=2.6)
names = ["tensor parallel", "sequence", "gathered again"]
kept, due, sent = ([getattr(v, f"{what}_bytes") / 1e3 for v in variants] for what in ("kept", "formula", "sent"))
ax = curves.bars([("", sent)], names, "kB", f"sent by each of 4 ranks in a layer's step {note_5 and f'({note_5})'}", ax=left)
ax = curves.bars([("recorded", kept), ("formula", due)], names, "kB", f"kept of the layer for backward {note_5 and f'({note_5})'}", ax=right)
plt.show()
ring, note_6 = mine_or(ring_attention, standins.ring_attention)
on_ring = lab06.train_ring(ring, cp=2, steps=10)
off = lab06.differences(on_ring, serial)["losses"]
Markdown(f"**Sequence parallel sends {sent[1] / sent[0]:.2f} times the bytes and keeps {kept[1] / kept[0]:.0%} of a layer's; gathered again {sent[2] / sent[0]:.2f} times and {kept[2] / kept[0]:.0%}. Attention round a ring: losses within {off:.0e} of serial's.** {note_6}")

# %% [markdown]
# ## 8 · The same in torch and DeepSpeed
# torch's `parallelize_module` cuts a module by a plan. Without `PrepareModuleInput` each of q, k, v, gate and up brings its own f. DeepSpeed's AutoTP finds the matrices by their modules' names.

# %%
for prepared in (False, True):
    calls = torchs.layer_calls(torchs.torchs(with_input=prepared))
    print(f"parallelize_module, PrepareModuleInput {prepared}: all_reduces per layer {calls}")
print("DeepSpeed's AutoTP on a Llama of transformers, two ranks: some seconds ...", flush=True)
auto = engines.autotp(tp=2)
print(f"AutoTP: all_reduces per layer {torchs.layer_calls(auto)}")
off = max(abs(a - b) for a, b in zip(auto.losses, auto.serial_losses, strict=True))
print(f"losses within {off:.0e} of the same model whole")
import_deepspeed()
from deepspeed.runtime.tensor_parallel import get_tensor_parallel_config  # noqa: E402

for keys in ({"enabled": True, "tp_size": 2}, {"tp": {"tp_size": 2}}, {"autotp_size": 2}):
    try:
        print(keys, "gives tensor parallel of", get_tensor_parallel_config({"tensor_parallel": keys}).autotp_size)
    except ValueError as error:
        print(keys, "is refused:", " ".join(str(error).split()[:5]))

# %% [markdown]
# AutoTP sums x's gradient once per matrix, too. Of the three settings a widely read guide has the first; the second is taken, and does *nothing*. Use the third, and leave out `train_batch_size`: DeepSpeed counts all ranks as data parallel.
#
# ```
# {"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": true},
#  "tensor_parallel": {"autotp_size": 8}, "zero_optimization": {"stage": 1}}
#
# deepspeed --num_gpus 8 train.py --deepspeed_config ds_config.json
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 train.py
# ```
#
# ## 9 · What is said of it

# %%
for claim in claims():
    print(f"{claim.verdict}: {claim.said}\n    {claim.figure}")

# %% [markdown]
# | you wrote | torch and DeepSpeed have | remember |
# |---|---|---|
# | `ColumnParallelLinear`, `RowParallelLinear` | `ColwiseParallel`, `RowwiseParallel`; AutoTP | column, then row: the middle stays |
# | `f`, `g` | `PrepareModuleInput`, DTensor | 2 all_reduces forward, 2 backward per layer |
# | `ParallelAttention` | the same, with `num_heads / t` | kv heads bound t |
# | `vocab_parallel_cross_entropy` | `loss_parallel()` | three numbers per token |
# | `SequenceParallelMLP` | `SequenceParallel` | the same bytes, activations over t |
# | `ring_attention` | `context_parallel`; DeepSpeed-Ulysses cuts heads instead | k and v travel, queries stay |
#
# **An open question.** Inside a node tensor parallel pays, across nodes it does not. A model of 405 billion parameters fits in no node. What could be cut so that between nodes only one tensor per layer *stack* travels? Lab 07 cuts the stack. (`labkit progress` in a terminal shows your points.)
