# %% [markdown]
# # 01 The price of a collective
#
# **Why does the same megabyte cost 10 µs or 10 ms?**
#
# About 45 minutes, after lab 00. No GPU: you measure this machine, learn the two numbers that describe a wire, and then price wires that you do not own.

# %%
import time
from statistics import median

import torch
import torch.distributed as dist
from IPython.display import HTML, Markdown, display

from labkit.check.check import mine_or
from labkit.cost import comm, groups, hardware
from labkit.labs import lab01
from labkit.view import curves, explore

# %% [markdown]
# **Where this hour leads.** One `all_reduce`, eight ranks, three wires, from published figures. By the end you will have drawn such a line for your own machine.

# %%
sizes, links = [2**power for power in range(10, 31)], ("NVLink 4", "PCIe 4", "10 GbE")
lines = []
for number, name in enumerate(links):
    times = [comm.time_s("all_reduce", size, 8, hardware.link(name)) for size in sizes]
    label = f"{name}: 1 MiB in {curves.as_time(times[10])}"
    lines.append(curves.Curve(label, sizes, times, number=number))
ax = curves.times(lines, "all_reduce on 8 ranks, ring")

# %% [markdown]
# Flat on the left, where size does not matter; straight on the right, where nothing else does.
#
# ## 1 · One call, two sizes
# Real ranks on your machine. The slowest rank counts, and the median of seven.
#
# **Question.** 1 MiB is 1,024 times 1 KiB. How many times longer does its `all_reduce` take?

# %%
ratio_guess = labkit.predict("1.ratio", ..., "times")  # your number in place of the dots


# %%
def time_all_reduce(num_bytes, repeats=7):
    tensor, times = torch.ones(num_bytes // 4, device=labkit.device()), []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()  # on a GPU: wait until it has happened
        times.append(time.perf_counter() - began)
    return median(times[1:])  # the first call also opens connections


small_s, large_s = (max(labkit.launch(time_all_reduce, 4, size)) for size in (2**10, 2**20))
ratio_guess.reveal(large_s / small_s)
Markdown(
    f"**1,024 times the bytes take {large_s / small_s:.2g} times as long: {small_s * 1e3:.2g} and {large_s * 1e3:.2g} ms.**"
)

# %% [markdown]
# A message costs something before its first byte moves. That is **alpha**, the latency. Each byte then costs **beta**, one over the bandwidth: time = alpha + beta · size.
#
# ## 2 · What has to travel
# The simplest sum: everyone sends to rank 0, which adds and sends back.


# %%
def star(tensor):
    got, others = torch.empty_like(tensor), range(1, dist.get_world_size())
    if dist.get_rank() != 0:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)
        return tensor
    for other in others:
        dist.recv(got, src=other)
        tensor += got
    for other in others:
        dist.send(tensor, dst=other)
    return tensor


star_sent, _ = lab01.sent_picture(star, 4)
ax = curves.bars([("star", star_sent)], [f"rank {r}" for r in range(4)], "sent, in tensors", "star")

# %% [markdown]
# Rank 0 sends for all. With 1,000 ranks and 1 MB it would send 999 MB, one after another.
#
# **Question.** Shared out evenly and cleverly, how many MB does each of 1,000 ranks send?

# %%
ring_megabytes_guess = labkit.predict("1.ring_megabytes", ..., "MB")

# %% [markdown]
# **Exercise 1.1: a sum round the ring** (12 min, core)
#
# Sum `tensor` over all ranks, in place, and return it. Cut it into n chunks, as equal as they can be. Every rank sends 2(n-1) messages of one chunk, always to the same neighbour, while it receives from the other; nothing is padded. The tensor has at least n elements.
#
# <details><summary>Hint 1: a question</summary>
# In step 0, rank r sends chunk r on. In step 1 it sends on what it just received and added to. After n-1 steps, which chunk is finished on rank r? What is left to do?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>tensor.view(-1).tensor_split(n)</code> gives n views, also where n does not divide (<code>chunk</code> may give fewer). <code>dist.isend</code>, <code>dist.recv</code>, <code>wait()</code>.
# </details>


# %% exercise="1.1"
def ring_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's `tensor` becomes the sum over ranks, in place. Shape and dtype are the same on all ranks."""
    # SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        mine, theirs = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        got = torch.empty_like(theirs)
        sending = dist.isend(mine, dst=(rank + 1) % n)
        dist.recv(got, src=(rank - 1) % n)
        sending.wait()
        theirs.copy_(theirs + got if step < n - 1 else got)  # first add, then only pass on
    return tensor
    # END SOLUTION


# %%
labkit.check("1.1")

# %%
sent, title = lab01.sent_picture(ring_all_reduce, 4)
names = [f"rank {r}" for r in range(4)]
ax = curves.bars([("star", star_sent), (title, sent)], names, "sent, in tensors", "who sends how much")
each = comm.sent_bytes("all_reduce", 1.0, 1000)
ring_megabytes_guess.reveal(each)
Markdown(f"**In a ring each rank sends 2(n-1)/n of the tensor: {sent[0]:g} times on 4 ranks, {each:.3f} on 1,000.**")

# %% [markdown]
# Never more than twice the tensor, however many ranks. The first n-1 steps are a *reduce_scatter*, the last n-1 an *all_gather*.
#
# ## 3 · The speed of a wire
# S / time is **algbw**. It falls with n even if the wire stays as fast, since an `all_reduce` moves 2(n-1)/n S. **busbw** takes that out: bytes on a wire per second, comparable with a datasheet.

# %% [markdown]
# **Exercise 1.2: the speed of a wire** (5 min, easy)
#
# Return busbw in bytes per second, as nccl-tests defines it, for `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast` and `reduce`. `num_bytes` is S, the *full* tensor: what a rank holds after an all_gather.
#
# <details><summary>Hint 1: a question</summary>
# How many times S does one rank send in each of them? A broadcast passes the tensor down a chain.
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>doc/PERFORMANCE.md</code> in NVIDIA/nccl-tests. Three different factors are enough.
# </details>


# %% exercise="1.2"
def bus_bandwidth(op: str, num_bytes: int, world_size: int, time_s: float) -> float:
    """Bytes per second of a wire, e.g. 1.5e9 for an all_reduce of 1 MB on 4 ranks in 1 ms."""
    # SOLUTION
    factor = {"all_reduce": 2 * (world_size - 1) / world_size, "broadcast": 1, "reduce": 1}
    return num_bytes / time_s * factor.get(op, (world_size - 1) / world_size)
    # END SOLUTION


# %%
labkit.check("1.2")

# %% [markdown]
# Now a sweep: six collectives, 1 KiB to 64 MiB, two ranks and four. The columns are those that nccl-tests prints.

# %%
busbw, note = mine_or(bus_bandwidth, comm.busbw)
sweeps = [sweep for n in (2, 4) for sweep in lab01.measure(n)]
mine = next(sweep for sweep in sweeps if (sweep.op, sweep.world_size) == ("all_reduce", 4))
print(note or "yours", lab01.table(mine, busbw), sep="\n")

# %%
rates = {
    (s.op, s.world_size): [busbw(s.op, size, s.world_size, t) for size, t in zip(s.sizes, s.medians, strict=True)]
    for s in sweeps
}
lines = [curves.Curve(op, lab01.SIZES, rates[op, 4], "points", number) for number, op in enumerate(lab01.OPS)]
ax = curves.bandwidths(lines, f"this machine, 4 ranks, busbw ({note or 'yours'})")
best = {n: max(rates["all_reduce", n]) / 1e9 for n in (2, 4)}
Markdown(f"**The best busbw of an all_reduce here is {best[2]:.2g} GB/s on 2 ranks and {best[4]:.2g} GB/s on 4.**")

# %% [markdown]
# Small messages waste the wire: alpha rules. Large ones reach a ceiling. On GPUs with wires of their own that ceiling hardly depends on n; here all ranks share the same cores and memory, so it does.

# %% [markdown]
# **Broken on purpose.** We start a 64 MiB `all_reduce` with `async_op=True` and stop the clock at once.
#
# **Question.** What busbw, in GB/s, will that show?

# %%
no_wait_guess = labkit.predict("1.no_wait", ..., "GB/s")


# %%
def stop_too_early(num_bytes):
    tensor = torch.ones(num_bytes // 4, device=labkit.device())
    dist.all_reduce(tensor)
    began = time.perf_counter()
    work = dist.all_reduce(tensor, async_op=True)
    time_s = time.perf_counter() - began  # the ring has hardly started
    work.wait()
    return time_s


too_early_s = max(labkit.launch(stop_too_early, 4, 2**26))
claimed = comm.busbw("all_reduce", 2**26, 4, too_early_s)
no_wait_guess.reveal(claimed / 1e9)
Markdown(
    f"**{claimed / 1e9:.3g} GB/s, where waiting gave {comm.busbw('all_reduce', 2**26, 4, mine.medians[-1]) / 1e9:.2g}: the clock measured the call, not the work.**"
)

# %% [markdown]
# On a GPU *every* collective returns before it is done; without `torch.cuda.synchronize()` this mistake is the default. And one more failure, meant to happen: rank 3 has a shorter last batch.


# %%
def shorter_on_rank_three():
    dist.all_reduce(torch.ones(1000 - 10 * (dist.get_rank() == 3), device=labkit.device()))


try:
    labkit.launch(shorter_on_rank_three, 4, prints="quiet")
except labkit.RankFailed as failure:
    print(failure)

# %% [markdown]
# ## 4 · Two numbers
# A sweep holds every repetition, also those during which another program had the core. Such a time is several times too long.
#
# **Exercise 1.3: two numbers for a link** (8 min, core)
#
# `sizes` and `times` are lists of equal length, several measurements a size, in any order; of five at most two are delayed. Return `(alpha_s, beta_s)`, with the line within 20% of the true one at *every* size.
#
# <details><summary>Hint 1: a question</summary>
# 2% of a 64 MiB message may be 1 ms, twenty times alpha. In which unit should an error count?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>statistics.median</code> per size; weighted least squares with weight 1/time (<code>torch.linalg.lstsq</code>); or the Theil-Sen estimator.
# </details>


# %% exercise="1.3"
def fit_alpha_beta(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """(alpha in seconds, beta in seconds per byte) of time = alpha + beta * size."""
    # SOLUTION
    known = sorted(set(sizes))
    middle = [median(t for s, t in zip(sizes, times, strict=True) if s == size) for size in known]
    size, middle = torch.tensor(known, dtype=torch.float64), torch.tensor(middle, dtype=torch.float64)
    rows = torch.stack([1 / middle, size / middle], dim=1)  # (alpha + beta s) / t should be 1
    alpha, beta = torch.linalg.lstsq(rows, torch.ones_like(middle)[:, None]).solution.flatten().tolist()
    return alpha, beta
    # END SOLUTION


# %%
labkit.check("1.3")

# %%
fit, note = mine_or(fit_alpha_beta, lab01.by_eye)
alpha_s, beta_s = fit(*mine.samples)
alpha_s = max(alpha_s, 0.0)
print(f"{note or 'yours'}: all_reduce on 4 ranks, alpha {alpha_s * 1e3:.3g} ms, beta {beta_s * 1e9:.3g} ns per byte")
Markdown(f"**At alpha / beta = {curves.as_size(alpha_s / beta_s)}, half of the time is latency.**")

# %% [markdown]
# **Question.** 8 MiB was not in the sweep. How many ms will its `all_reduce` take on 4 ranks? Two numbers and a size are all you need.

# %%
unmeasured_guess = labkit.predict("1.unmeasured", ..., "ms")

# %%
new_s = max(labkit.launch(time_all_reduce, 4, 2**23))
line_s = alpha_s + beta_s * 2**23
unmeasured_guess.reveal(new_s * 1e3)
fitted = curves.Curve(
    f"alpha + beta S ({note or 'yours'})", sizes[:17], [alpha_s + beta_s * size for size in sizes[:17]]
)
points = curves.Curve("every repetition", *mine.samples, "points", 1)
ax = curves.times([fitted, points, curves.Curve("8 MiB, new", [2**23], [new_s], "points", 5)], "all_reduce, 4 ranks")
Markdown(
    f"**The line says {line_s * 1e3:.3g} ms, the clock {new_s * 1e3:.3g} ms: {abs(line_s / new_s - 1):.0%} apart.**"
)

# %% [markdown]
# ## 5 · Wires you do not own
# Alpha and beta of a *message*, from datasheets. A ring of n takes 2(n-1) of them, one after another.
#
# **Question.** 64 ranks, 10 Gbit/s Ethernet, 1 MiB: how many ms?

# %%
ethernet_guess = labkit.predict("1.ethernet", ..., "ms")

# %%
for name in ("NVLink 4", "PCIe 4", "InfiniBand NDR", "100 GbE", "10 GbE"):
    group = groups.on_link(64, hardware.link(name))
    ring_s, tree_s = (comm.group_time_s("all_reduce", 2**20, group, a) for a in ("ring", "tree"))
    print(f"{name:15} ring {ring_s * 1e3:6.3f} ms   tree {tree_s * 1e3:6.3f} ms")
ethernet_guess.reveal(ring_s * 1e3)
equal = comm.crossover_bytes("all_reduce", group, "ring", "tree")
Markdown(f"**On 10 GbE the ring takes {ring_s * 1e3:.2f} ms; below {curves.as_size(equal)} a tree is faster.**")

# %% [markdown]
# A ring pays alpha 2(n-1) times, a tree about 2 log2(n) times. NCCL switches between them by size. Move the sliders: where does your laptop stand? (With the keyboard: Tab, then arrow keys.)

# %%
laptop = comm.link_of("this laptop, fitted", "all_reduce", 4, alpha_s, beta_s)
explore.collectives(sweeps, links=[laptop])

# %% [markdown]
# On a GPU machine you would run `all_reduce_perf` of nccl-tests. Below is an *example of its log's format*. It was not measured: its times come from this course's cost model of one DGX H100.

# %%
log = lab01.nccl_log.example()
display(HTML(f"<pre style='white-space:pre; overflow-x:auto'>{log}</pre>"))  # lines too long to wrap
rows = lab01.nccl_log.read(log)
alpha_log_s, beta_log_s = fit([row.num_bytes for row in rows], [row.time_s for row in rows])
wire = comm.link_of("read off the log", "all_reduce", 8, alpha_log_s, beta_log_s)
nvlink = hardware.link("NVLink 4").bandwidth
Markdown(
    f"**The log's line: alpha {alpha_log_s * 1e6:.3g} µs, a wire of {wire.bandwidth / 1e9:.3g} GB/s. NVLink 4 has {nvlink / 1e9:g}.** {note}"
)

# %% [markdown]
# Knobs for such a run, set before the program starts:
#
# | variable | what it does |
# |---|---|
# | `NCCL_DEBUG=INFO` | prints topology, rings, and the transport of each link |
# | `NCCL_SOCKET_IFNAME=eth0` | which network interface; a frequent cause of hangs at start |
# | `NCCL_ALGO=Ring` or `Tree` | forces an algorithm, for experiments |
# | `NCCL_PROTO=LL`, `LL128`, `Simple` | low latency or full bandwidth, for experiments |

# %% [markdown]
# ## 6 · Two kinds of wire
# Ranks 0 and 1 share a node, ranks 2 and 3 another. Inside a node the wire is fast, between nodes it is not.
#
# **Question.** In a flat ring 0 → 1 → 2 → 3 → 0, how many times the tensor leaves each node?

# %%
leaving_guess = labkit.predict("1.leaving", ..., "tensors")

# %% [markdown]
# **Exercise 1.4: two levels of wire** (15 min, hard)
#
# Sum `tensor` over all ranks, in place, and return it. Node k holds ranks k·g to k·g + g-1, g being `ranks_per_node`. With 2 nodes only S may leave each node (2(k-1)/k S with k nodes), each rank carrying its g-th part. Messages or collectives of smaller groups, as you like; the tensor need not divide.
#
# <details><summary>Hint 1: a question</summary>
# After a reduce_scatter within the node, rank r holds one part of the node's sum. Who else needs exactly that part?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>dist.new_subgroups_by_enumeration</code> (called by all ranks), <code>dist.reduce_scatter</code>, <code>dist.all_gather</code>; <code>torch.nn.functional.pad</code> where parts must be equal.
# </details>


# %% exercise="1.4"
def hierarchical_all_reduce(tensor: torch.Tensor, ranks_per_node: int) -> torch.Tensor:
    """As ring_all_reduce, with few bytes between nodes. world_size is a multiple of ranks_per_node."""
    # SOLUTION
    n, g = dist.get_world_size(), ranks_per_node
    nodes = [list(range(first, first + g)) for first in range(0, n, g)]
    inside, _ = dist.new_subgroups_by_enumeration(nodes)
    across, _ = dist.new_subgroups_by_enumeration([list(range(place, n, g)) for place in range(g)])
    padded = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % g))
    parts = list(padded.chunk(g))
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=inside)
    dist.all_reduce(mine, group=across)
    dist.all_gather(parts, mine, group=inside)
    return tensor.copy_(torch.cat(parts)[: tensor.numel()].view_as(tensor))
    # END SOLUTION


# %%
labkit.check("1.4")

# %%
flat, first = lab01.leaving_picture(ring_all_reduce, due=1.5)
two, second = lab01.leaving_picture(hierarchical_all_reduce, args=[2], due=1.0)
ax = curves.bars([(first, flat), (second, two)], ["node 0", "node 1"], "leaving, in tensors", "2 nodes of 2")
leaving_guess.reveal(flat[0])
Markdown(f"**{flat[0]:g} tensors leave a node in the flat ring, {two[0]:g} in two levels.**")

# %% [markdown]
# What is that worth? Two published nodes of eight T4s, one network card each, 1 GiB of gradients:

# %%
for nic in ("100 GbE", "25 GbE", "10 GbE"):
    pair = groups.on_cluster(hardware.cluster("8xT4", num_nodes=2, nic=nic))
    ring_s, levels_s = (comm.group_time_s("all_reduce", 2**30, pair, a) for a in ("ring", "hierarchical"))
    print(f"{nic:8} flat ring {ring_s * 1e3:5.0f} ms, two levels {levels_s * 1e3:5.0f} ms")
leaving = [comm.leaving_bytes("all_reduce", 1.0, pair, a) for a in ("ring", "hierarchical")]
Markdown(
    f"**{leaving[0]:g} tensors leave a node of eight in a ring, {leaving[1]:g} in two levels: {ring_s / levels_s:.2g} times faster on 10 GbE.**"
)

# %% [markdown]
# On 100 GbE the ring wins: it uses both kinds of wire at once, two levels take turns. The slower the wire between nodes, the more the saved bytes are worth.

# %% [markdown]
# ## 7 · The same in torch
# `dist.all_reduce` on the same tensor. gloo's is a ring too, in C++ and in smaller pieces.


# %%
def yours_and_torchs(num_elements):
    tensor, seconds, sums = torch.rand(num_elements), [], []
    for fn in (dist.all_reduce, ring_all_reduce):
        sums.append(tensor.clone())
        dist.barrier()
        began = time.perf_counter()
        out = fn(sums[-1])
        seconds.append(time.perf_counter() - began)
    return "not yet yours" if out is NotImplemented else torch.allclose(*sums), seconds


same, seconds = labkit.launch(yours_and_torchs, 4, 2**22, backend="gloo")[0]
print(f"same sums: {same}; 16 MiB take torch {seconds[0] * 1e3:.1f} ms, yours {seconds[1] * 1e3:.1f} ms")

# %% [markdown]
# The sweep is an ordinary program. On a cluster, a launcher starts it on every node:
#
# ```
# torchrun --standalone --nproc-per-node 4 -m labkit.cli run lab01.sweep
# ```

# %% [markdown]
# | you wrote | the field has | remember |
# |---|---|---|
# | `ring_all_reduce` | `dist.all_reduce` | 2(n-1)/n S a rank, 2(n-1) alphas |
# | `bus_bandwidth` | nccl-tests' busbw | compare it with a datasheet |
# | `fit_alpha_beta` | the alpha-beta model | errors count in percent |
# | `hierarchical_all_reduce` | HSDP, Horovod's hierarchical allreduce | cross slow wires last, with less |
#
# **An open question.** Gradients come one layer at a time, from last to first. One `all_reduce` per layer pays alpha often; one for all must wait for the last layer. How large should a bucket be? Lab 02 lets you choose. (`labkit progress` in a terminal shows your points.)
