# %% [markdown]
# # 00 Ranks
#
# **What changes when four copies of your program run at once?**
#
# About 45 minutes. You need Python and a first look at PyTorch tensors; no GPU. You will start real processes, make them talk, and freeze them on purpose.
#
# *Run All* stops at the first check that is not passed yet. After a restart, run the first two code cells again.

# %%
import os
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from IPython.display import Markdown

from labkit.doctor import environment
from labkit.labs import lab00
from labkit.view import plot

# %% [markdown]
# **Where this hour leads.** Four programs run the next cell at the same time. Each starts with a row of its own. One line later all hold the same row, which nobody had before.

# %%
def one_line():
    row = torch.arange(4, device=labkit.device()) + 10 * dist.get_rank()
    before = row.tolist()
    dist.all_reduce(row)  # the line
    return before, row.tolist()


before, after = zip(*labkit.launch(one_line, 4), strict=True)
ax = plot.grids(before, after, "four programs, one line")

# %% [markdown]
# Sum gradients with that line, and you train on four machines. What travelled? And why does one copy that forgets the line freeze the other three?
#
# First, what this machine has, and what is missing costs you:

# %%
environment.examine()  # in a terminal: labkit doctor

# %% [markdown]
# ## 1 · Who am I?
# `launch(f, 4)` runs `f` in four processes and returns what they return.

# %%
def hello():
    print(f"I am rank {dist.get_rank()} of {dist.get_world_size()}")
    return os.getpid()  # the number of this process


labkit.launch(hello, 4)

# %% [markdown]
# Only a number tells the four apart: the **rank**. Prints come in any order, results in rank order.
#
# **Question.** The notebook has `counter = 10`; four ranks each add 1. What does the notebook see then?

# %%
counter = 10
counter_guess = labkit.predict("0.counter", ...)  # your number in place of the dots

# %%
def add_one():
    global counter
    counter += 1
    return counter


print("in the ranks:", labkit.launch(add_one, 4))
counter_guess.reveal(counter)
Markdown(f"**4 ranks, 4 memories of their own: the notebook's counter is still {counter}.**")

# %% [markdown]
# Each rank raised its own copy to 11. Single program, multiple data: SPMD.
#
# ## 2 · Whose rows are these?
# Ten real numbers: the longest pages of Python's reference, in characters. Their mean is our *serial baseline*.

# %%
from pydoc_data.topics import topics

page_chars = torch.tensor(sorted(len(page) for page in topics.values())[-10:])
serial_mean = page_chars.double().mean().item()
print(page_chars.tolist(), f"\nserial mean: {serial_mean} characters")

# %% [markdown]
# **Exercise 0.1: whose rows are these?** (6 min, easy)
#
# Return the block of rows `0 … num_rows-1` that a rank owns, as a `range`. Every row on exactly one rank, in rank order; sizes differ by one at most. With fewer rows than ranks, some ranges are empty.
#
# <details><summary>Hint 1: a question</summary>
# Ten rows, four ranks: two are left over. If ranks 0 and 1 take one more each, where does rank 2 start?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>divmod(num_rows, world_size)</code>, and what <code>min(rank, extra)</code> counts.
# </details>

# %% exercise="0.1"
def rows_of_rank(num_rows: int, rank: int, world_size: int) -> range:
    """The rows that `rank` owns, e.g. 10 rows on 4 ranks: blocks of 3, 3, 2 and 2."""
    # SOLUTION
    size, extra = divmod(num_rows, world_size)
    start = rank * size + min(rank, extra)
    return range(start, start + size + (rank < extra))
    # END SOLUTION

# %%
labkit.check("0.1")

# %%
shards, title = lab00.rows_picture(rows_of_rank, len(page_chars), 4)
ax = plot.shards(shards, len(page_chars), title)
shards = lab00.pictures.usable_shards(shards, len(page_chars))  # balanced ones, should yours not be

# %% [markdown]
# **Question.** Each rank takes the mean of its rows; the four means are averaged. What comes out, in characters?

# %%
mean_of_means_guess = labkit.predict("0.mean_of_means", ..., "characters")

# %%
def mean_two_ways(my_rows):
    mean = my_rows.double().mean().to(labkit.device())
    sum_and_count = torch.tensor([my_rows.sum(), len(my_rows)]).double().to(labkit.device())
    dist.all_reduce(mean)
    dist.all_reduce(sum_and_count)  # every rank now holds the sums over all ranks
    return (mean / dist.get_world_size()).item(), (sum_and_count[0] / sum_and_count[1]).item()


pieces = [(page_chars[rows.start : rows.stop],) for rows in shards]
naive, exact = zip(*labkit.launch(mean_two_ways, 4, rank_args=pieces), strict=True)
mean_of_means_guess.reveal(naive[0])
print("sum over count, on each rank:", exact)
off, right = naive[0] - serial_mean, exact[0] - serial_mean
Markdown(f"**A mean of means is off by {off:.0f}; a sum over a count by {right:g}.**")

# %% [markdown]
# All ranks agree on both numbers and nothing crashed. In the first, two rows weigh as much as three.
#
# ## 3 · One message
# `send(tensor, dst)` on one rank, `recv(tensor, src)` on the other. Rank 1 is late: it sleeps half a second first.
#
# **Question.** The message is 4 bytes. How many seconds does rank 0 spend in `send`?

# %%
send_guess = labkit.predict("0.send", ..., "s")

# %%
def late_receiver():
    note, began = torch.zeros(1), time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(note, dst=1)
    else:
        time.sleep(0.5)
        dist.recv(note, src=0)
    return time.perf_counter() - began


send_s, recv_s = labkit.launch(late_receiver, 2, backend="gloo")
spans = [(0, 0, send_s, "waiting", "in send"), (1, 0, recv_s, "idle", "asleep")]
ax = plot.spans(spans, "who waits for whom")
plt.show()  # now, above what is said about it
send_guess.reveal(send_s)
Markdown(f"**A message is a meeting: 4 bytes kept the sender for {send_s:.2f} s.**")

# %% [markdown]
# `send` waited for its `recv`: gloo, the backend on CPUs, does so at every size. NCCL, on GPUs, may let small messages through; do not rely on it.
#
# ## 4 · From one to all
# Rank 0 has the weights, seven others need them. The simplest way:

# %%
def star(tensor, root):
    if dist.get_rank() == root:
        for other in range(dist.get_world_size()):
            if other != root:
                dist.send(tensor, dst=other)
    else:
        dist.recv(tensor, src=root)
    return tensor


messages, title = lab00.broadcast_picture(star, star, 8)
ax = plot.messages(messages, 8, title)

# %% [markdown]
# Real ranks, simulated clock: in one *round* a rank sends one message and receives one. Rank 1 knows after round one, and idles.
#
# **Question.** In how few rounds can one rank tell 1,000 ranks in all?

# %%
rounds_guess = labkit.predict("0.rounds", ..., "rounds")

# %%
know, rounds = 1, 0
while know < 1000:
    know, rounds = 2 * know, rounds + 1  # at best, everyone who knows tells one who does not
rounds_guess.reveal(rounds)
Markdown(f"**Let those who know pass it on: {rounds} rounds, where a star takes {1000 - 1}.**")

# %% [markdown]
# **Exercise 0.2: broadcast** (12 min, core)
#
# Fill `tensor` on every rank with the root's values, in place, and return it. Only `dist.send` and `dist.recv` (or `isend`, `irecv`). Any number of ranks, any root, at most ⌈log2 n⌉ rounds; nobody is sent the tensor twice.
#
# <details><summary>Hint 1: a question</summary>
# After one round ranks 0 and 1 know, after two ranks 0 to 3. Whom does rank 1 tell in round two? With five ranks, who has nobody to tell?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# Binomial tree. Count places from the root, <code>(rank - root) % world_size</code>, and turn them back into ranks to send.
# </details>

# %% exercise="0.2"
def broadcast(tensor: torch.Tensor, root: int) -> torch.Tensor:
    """Every rank's `tensor` becomes the root's, in place. Shape and dtype are the same on all ranks."""
    # SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place, reach = (rank - root) % world_size, 1  # the root has place 0; places below `reach` know
    while reach < world_size:
        if place < reach and place + reach < world_size:
            dist.send(tensor, dst=(place + reach + root) % world_size)
        elif reach <= place < 2 * reach:
            dist.recv(tensor, src=(place - reach + root) % world_size)
        reach *= 2
    return tensor
    # END SOLUTION

# %%
labkit.check("0.2")

# %%
messages, title = lab00.broadcast_picture(broadcast, star, 8)
ax = plot.messages(messages, 8, title)

# %% [markdown]
# ## 5 · Nothing moves
# Two ranks swap numbers: both send, then receive. Can it work?

# %%
def swap():
    mine = torch.tensor([float(dist.get_rank())])
    theirs = torch.empty_like(mine)
    dist.send(mine, dst=1 - dist.get_rank())
    dist.recv(theirs, src=1 - dist.get_rank())
    return theirs.item()


try:
    print(labkit.launch(swap, 2, backend="gloo"))
except labkit.RankFailed as failure:
    print(failure)

# %% [markdown]
# A *deadlock*, and a failure that is meant to happen. Plain torch would be silent for its timeout, half an hour. `launch` sees what each rank waits for.
#
# **Exercise 0.3: a ring that cannot hang** (8 min, core)
#
# Send `tensor` to the right neighbour, rank + 1, and return what came from the left. The last rank's right neighbour is rank 0. It never hangs, on odd world sizes either; `tensor` keeps its values; a lone rank is its own neighbour.
#
# <details><summary>Hint 1: a question</summary>
# Somebody must be in <code>recv</code> while somebody else is in <code>send</code>. Must you wait for your send before you receive?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>dist.isend</code> and its <code>wait()</code>; <code>torch.empty_like</code>; or <code>dist.batch_isend_irecv</code>.
# </details>

# %% exercise="0.3"
def ring_exchange(tensor: torch.Tensor) -> torch.Tensor:
    """What the left neighbour passed to this rank, in a tensor of its own."""
    # SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, dst=(rank + 1) % world_size)
    dist.recv(received, src=(rank - 1) % world_size)
    sending.wait()
    return received
    # END SOLUTION

# %%
labkit.check("0.3")

# %%
before, after, title = lab00.ring_picture(ring_exchange, 5)
ax = plot.grids(before, after, title)

# %% [markdown]
# Five messages, one round: the step of ring all-reduce (lab 01) and ring attention (lab 06, coming).
#
# ## 6 · The collectives
# Common patterns have names. In a *collective*, every rank makes the same call. The root is rank 2.

# %%
def from_one(root=2):
    row = torch.arange(4, device=labkit.device()) + 10 * dist.get_rank()
    before, piece = row.tolist(), torch.zeros_like(row[:1])
    dist.scatter(piece, list(row.split(1)) if dist.get_rank() == root else None, src=root)
    dist.broadcast(row, src=root)
    return before, row.tolist(), piece.tolist()


before, broadcasted, scattered = zip(*labkit.launch(from_one, 4), strict=True)
left, right = plot.side_by_side(2, width=5)
ax = plot.grids(before, broadcasted, "broadcast from rank 2", ax=left)
ax = plot.grids(before, scattered, "scatter from rank 2", ax=right)

# %%
def to_one(root=2):
    row = torch.arange(4, device=labkit.device()) + 10 * dist.get_rank()
    at_root = dist.get_rank() == root
    pieces = [torch.zeros_like(row[:1]) for _ in range(4)] if at_root else None
    dist.gather(row[:1].clone(), pieces, dst=root)
    dist.reduce(row, dst=root)  # only the root's row means something afterwards
    return (torch.cat(pieces).tolist(), row.tolist()) if at_root else (None, None)


gathered, reduced = zip(*labkit.launch(to_one, 4), strict=True)
left, right = plot.side_by_side(2, width=5)
ax = plot.grids([row[:1] for row in before], gathered, "gather to rank 2", ax=left)
ax = plot.grids(before, reduced, "reduce to rank 2", ax=right)

# %% [markdown]
# A number keeps the colour of its rank; dark ones are sums over ranks.
#
# **Question.** `reduce_scatter` sums like `reduce`, but leaves rank r only the r-th number. What does rank 2 hold?

# %%
reduce_scatter_guess = labkit.predict("0.reduce_scatter", ...)

# %%
def everyone():
    row = torch.arange(4, device=labkit.device()) + 10 * dist.get_rank()
    summed, piece, swapped = row.clone(), torch.zeros_like(row[:1]), torch.zeros_like(row)
    gathered = [torch.zeros_like(piece) for _ in range(4)]
    dist.all_reduce(summed)
    dist.reduce_scatter(piece, list(row.split(1)))
    dist.all_gather(gathered, row[:1].clone())
    dist.all_to_all_single(swapped, row)
    return summed.tolist(), piece.tolist(), torch.cat(gathered).tolist(), swapped.tolist()


summed, piece, gathered, swapped = zip(*labkit.launch(everyone, 4), strict=True)
one, two = plot.side_by_side(2, width=5), plot.side_by_side(2, width=5)
ax = plot.grids(before, summed, "all_reduce", ax=one[0])
ax = plot.grids(before, piece, "reduce_scatter", ax=one[1])
ax = plot.grids([row[:1] for row in before], gathered, "all_gather", ax=two[0])
ax = plot.grids(before, swapped, "all_to_all", ax=two[1])
plt.show()
reduce_scatter_guess.reveal(piece[2][0])
terms = " + ".join(str(row[2]) for row in before)
Markdown(f"**Rank 2 keeps {terms} = {piece[2][0]}: a quarter of an all_reduce.**")

# %% [markdown]
# The dark column of `reduce_scatter` is a dark row of `all_reduce`, cut in four: all_reduce = reduce_scatter + all_gather. ZeRO (lab 04, coming) lives on that.
#
# One collective moves no data. Watch when the ranks leave it:

# %%
def barrier():
    began = time.perf_counter()
    time.sleep(0.1 * dist.get_rank())
    came_s = time.perf_counter() - began
    dist.barrier()
    return came_s, time.perf_counter() - began


spans = []
for rank, (came_s, left_s) in enumerate(labkit.launch(barrier, 4)):
    spans += [(rank, 0, came_s, "forward", "at work"), (rank, came_s, left_s, "waiting", "in barrier")]
ax = plot.spans(spans, "barrier: nobody leaves before the last has come")

# %% [markdown]
# **Exercise 0.4: gather without padding** (10 min, core)
#
# torch's `gather` needs equal shapes. Here rank r has its own number of rows, perhaps none; the other dims and the dtype are the same. The root returns all rows in rank order, the others `None`. Rows travel by `send` and `recv` only, straight to the root, not a byte more; before them, if you like, their count as one int64, sent or by torch's `gather`. Only the root receives.
#
# <details><summary>Hint 1: a question</summary>
# To receive, the root needs a tensor of the right size. How can it know the size before the rows come?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>tensor.new_empty(n, *tensor.shape[1:])</code>, <code>torch.cat</code>. Where do the root's own rows go?
# </details>

# %% exercise="0.4"
def gather_uneven(tensor: torch.Tensor, root: int) -> torch.Tensor | None:
    """All ranks' rows, concatenated in rank order, at the root; None on the others."""
    # SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.send(torch.tensor([len(tensor)], device=tensor.device), dst=root)
        dist.send(tensor, dst=root)
        return None
    parts = [tensor] * world_size
    for source in range(world_size):
        if source != root:
            num_rows = torch.zeros(1, dtype=torch.int64, device=tensor.device)
            dist.recv(num_rows, src=source)
            parts[source] = tensor.new_empty(int(num_rows), *tensor.shape[1:])
            dist.recv(parts[source], src=source)
    return torch.cat(parts)
    # END SOLUTION

# %%
labkit.check("0.4")

# %%
before, after, title = lab00.gather_picture(gather_uneven, rows=(1, 3, 0, 2), root=1)
ax = plot.grids(before, after, title)

# %% [markdown]
# ## 7 · When ranks disagree
# Two ranks sum `weight` (all 1) and `bias` (all 100). Rank 1 takes them in another order, as a `set` of names may.
#
# `run_ranks` is `launch`, but returns what happened instead of raising.
#
# **Question.** `weight` should become 1 + 1 = 2. What does it become?

# %%
swapped_guess = labkit.predict("0.swapped", ...)

# %%
def sum_gradients():
    grads = {"weight": torch.full((2, 2), 1.0), "bias": torch.full((4,), 100.0)}
    names = ["weight", "bias"] if dist.get_rank() == 0 else ["bias", "weight"]
    for name in names:
        dist.all_reduce(grads[name])
    return {name: grad.flatten()[0].item() for name, grad in grads.items()}


outcome = labkit.run_ranks(sum_gradients, 2, backend="gloo")
print("plain gloo, no error:", outcome.results)
weight = outcome.results[0]["weight"]
swapped_guess.reveal(weight)
Markdown(
    f"What launch says: {outcome.cause.sentence}\n\n**Matched by order, not by name: {weight:g} instead of 2, and no error.**"
)

# %% [markdown]
# Gloo added weight to bias: first call with first call. Training would go on. Each rank keeps a *ledger* of its calls, and `launch` compares them.
#
# Now rank 2 has three batches and the others four.

# %%
def train(batches):
    for _ in range(batches):
        dist.all_reduce(torch.ones(1, device=labkit.device()))


try:
    labkit.launch(train, 4, rank_args=[(4,), (4,), (3,), (4,)])
except labkit.RankFailed as failure:
    print(failure)

# %% [markdown]
# Rank 2 returned, content. The others wait in their fourth call, #3 counted from 0. Plain torch would show "Connection closed by peer", on innocent ranks.
#
# ## 8 · The same in torch

# %%
def yours_and_torchs(tensor, root=1):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    theirs, received = tensor.clone(), torch.empty_like(tensor)
    dist.broadcast(theirs, src=root)
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    recv = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()
    pairs = [(broadcast(tensor.clone(), root), theirs), (ring_exchange(tensor), received)]
    return [lab00.pictures.compared(yours, torchs) for yours, torchs in pairs]


outcome = labkit.run_ranks(yours_and_torchs, 4, rank_args=[(torch.rand(3, 5),) for _ in range(4)])
outcome.cause.sentence if outcome.cause else list(outcome.results)

# %% [markdown]
# On a cluster, a script calls `dist.init_process_group()` and a launcher starts it, here with four ranks on one machine. The code inside is what you wrote.
#
# ```
# torchrun --standalone --nproc-per-node 4 train.py
# ```

# %% [markdown]
# | you wrote | torch has | remember |
# |---|---|---|
# | `rows_of_rank` | `torch.tensor_split` | sizes differ by one at most |
# | `broadcast` | `dist.broadcast` | ⌈log2 n⌉ rounds, not n - 1 |
# | `ring_exchange` | `dist.batch_isend_irecv` | a send is a meeting |
# | `gather_uneven` | `dist.gather`, equal shapes only | counts first, no padding |
#
# **An open question.** In each of your ⌈log2 n⌉ rounds the *whole* tensor travels, and most ranks idle. Cut it into pieces: how close can n ranks come to the time of a single copy? Lab 01 measures what a round costs. (`labkit progress` in a terminal shows your points.)
