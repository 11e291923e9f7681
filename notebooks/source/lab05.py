# %% [markdown]
# # 05 Offload
#
# **When is it worth paying PCIe to save HBM?**
#
# About 75 minutes, after lab 03. No GPU: a device with memory of its own is played on this machine, so that you see what lies where and what crosses the wire; its record is replayed on GPUs that you do not own.

# %%
import os
import tempfile

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown

from labkit.check.check import mine_or
from labkit.check.table import table
from labkit.cost import hardware, states
from labkit.cost.named import named
from labkit.cost.shapes import parameters
from labkit.labs import lab05
from labkit.labs.lab05 import pays
from labkit.labs.lab05.configurations import DRAM, NVME
from labkit.view import curves, offload, plot

# %% [markdown]
# **Where this hour leads.** One step of a small Llama whose Adam lives in the host's memory, replayed on a T4.

# %%
t4, dram = hardware.device("T4"), DRAM["2 x DDR5-5600"]
hosted = lab05.train(lambda weights: lab05.TorchOnHost(weights, lr=1e-3))
ax = plot.timeline(lab05.lanes(hosted, lab05.replayed(hosted, t4, dram)), "state on the host, T4 over PCIe 3, two channels of DDR5")

# %% [markdown]
# Gradients travel down and weights up, while backward goes on. You will build that, then say when it pays.

# %% [markdown]
# ## 1 · What must be where
# In bf16 a parameter has 2 bytes of weight, 2 of gradient and 12 of Adam: a master and two moments in fp32. Forward and backward never look at those 12.
#
# **Question.** Move gradients and Adam's state to the host: how many times as large a model do 24 GiB hold? (Activations aside.)

# %%
larger_guess = labkit.predict("5.larger", ..., "times")  # your number in place of the dots

# %%
each = states.per_parameter()
plain = states.largest_parameters(24 * 2**30, each, 0, 1)
moved_out = 24 * 2**30 / each.parameter
larger_guess.reveal(moved_out / plain)
Markdown(f"**{moved_out / plain:.0f} times: {plain / 1e9:.2g} billion parameters at {each.total} bytes, {moved_out / 1e9:.3g} billion at {each.parameter}.**")

# %% [markdown]
# The idea is *ZeRO-Offload* (arXiv:2101.06840). It has a price: 2 bytes of gradient down and 2 of weight up, per parameter and step, over a link some hundred times as slow as the GPU's memory.

# %%
cards = [hardware.device(name) for name in ("T4", "RTX 4090", "A100-80", "H100")]
wires = {"HBM": [card.memory_bandwidth for card in cards], "PCIe": [card.host.bandwidth for card in cards]}
ax = curves.bars([(name, [rate / 1e9 for rate in rates]) for name, rates in wires.items()], [c.name for c in cards], "GB/s")
ax.set_yscale("log")
print("host:", ", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in {**DRAM, **NVME}.items()))

# %% [markdown]
# ## 2 · A device of your own
# On a CPU, "device" and "host" are one RAM. So labkit plays a device: its tensors live apart, `.to("cpu")` and `copy_` are the only ways over, and every byte is counted. First torch's AdamW, all of it there.

# %%
on_device = lab05.train(lambda weights: torch.optim.AdamW(weights, lr=1e-3, foreach=False))
ax = curves.lines([("", range(len(on_device.held)), [b / 1e6 for b in on_device.held], "line")], "ops of one step", "MB", "held by the device, torch's AdamW")
Markdown(f"**Between steps it holds {on_device.held[-1] / on_device.parameter_bytes:.2f} times its weights: bf16 moments beside them, and no master.**")

# %% [markdown]
# Forward piles up activations, backward trades them for gradients. The floor of the curve is what we can do without. A failure that is meant to happen:

# %%
from labkit.record.device import Book, to_device  # noqa: E402

weight, moment = to_device(torch.ones(3), Book()), torch.zeros(3)
try:
    weight -= moment
except RuntimeError as error:
    print(error)

# %% [markdown]
# As on CUDA: who mixes places must copy. Gradients appear one by one in backward, so each can leave, be used and be freed while the GPU works on the next layer.

# %% [markdown]
# **Exercise 5.1: the state moves out** (15 min, core)
#
# `OffloadedAdam(parameters, lr, betas, eps, weight_decay)`: AdamW, with master and moments in fp32 on the host.
#
# - As a gradient appears, in backward: copy it to the host *in its own dtype*, free it, update there, copy the new weight back.
# - `step()` finds all done. A parameter without a gradient keeps weight, state and count of steps.
# - Adam's arithmetic is yours, or `torch.optim`'s on host tensors. No threads.
#
# <details><summary>Hint 1: a question</summary>
# Two layers, gradient of the last one first: what can go home before the first one's is there? Who tells you?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>Tensor.register_post_accumulate_grad_hook</code>; <code>p.detach().to("cpu", torch.float32, copy=True)</code>; <code>p.copy_(master)</code> converts on the way. <code>.to("cpu", torch.float32)</code> of a gradient converts first, and moves 4 bytes.
# </details>


# %% exercise="5.1"
class OffloadedAdam:
    """AdamW on the host, a parameter at a time, while backward goes on. One backward for each step."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        # SOLUTION
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.parameters = [p for p in parameters if p.requires_grad]
        self.state, pinned = {}, torch.cuda.is_available()
        for p in self.parameters:
            master = p.detach().to("cpu", torch.float32, copy=True)
            kept = [torch.empty_like(master, pin_memory=pinned) for _ in range(3)]
            kept[0].copy_(master)
            kept[1].zero_(), kept[2].zero_()
            self.state[p] = [*kept, 0]
            p.register_post_accumulate_grad_hook(self.update)
        # END SOLUTION

    @torch.no_grad()
    def update(self, p):
        # SOLUTION
        grad = p.grad.to("cpu").float()
        p.grad = None
        master, m, v, t = self.state[p]
        self.state[p][3] = t = t + 1
        b1, b2 = self.betas
        m.lerp_(grad, 1 - b1)
        v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        master.mul_(1 - self.lr * self.weight_decay)
        master.addcdiv_(m / (1 - b1**t), (v / (1 - b2**t)).sqrt_().add_(self.eps), value=-self.lr)
        p.copy_(master)
        # END SOLUTION

    def step(self):
        # SOLUTION
        pass
        # END SOLUTION

    def zero_grad(self):
        # SOLUTION
        for p in self.parameters:
            p.grad = None
        # END SOLUTION


# %%
labkit.check("5.1")

# %%
Mine, note = mine_or(OffloadedAdam, lab05.TorchOnHost, "torch's")
note = note and f" ({note})"
moved = lab05.train(lambda weights: Mine(weights, lr=1e-3))
both = [("torch's AdamW", on_device), (f"offloaded{note}", moved)]
lines = [(name, range(len(p.held)), [b / 1e6 for b in p.held], "line") for name, p in both]
ax = curves.lines(lines, "ops of one step", "MB", f"held by the device{note}")
off = max(abs(a - b) for a, b in zip(moved.losses, hosted.losses, strict=True))
Markdown(f"**The floor falls from {on_device.held[-1] / 1e6:.1f} to {moved.held[-1] / 1e6:.1f} MB, the weights alone; {moved.moved('down') / 1e6:.2f} MB go down in a step and {moved.moved('up') / 1e6:.2f} up.** Losses equal torch's on the host to {off:.0e}.{note}")

# %% [markdown]
# What is given up: the norm of all gradients is known when the first are used already, so no clipping; and two backwards for one step would be two updates. DeepSpeed updates after backward, for that reason.
#
# **Question.** Replayed on the T4: how many times as long is the step with the state on the host?

# %%
slower_guess = labkit.predict("5.slower", ..., "times")

# %%
played = {name: (p, lab05.replayed(p, t4, dram)) for name, p in both}
lanes = [lane for name, (p, on_t4) in played.items() for lane in lab05.lanes(p, on_t4)]
ax = plot.timeline(lanes, f"above torch's AdamW, below offloaded; T4 over PCIe 3{note}")
plt.show()
times = [on_t4.time_s for _, on_t4 in played.values()]
slower_guess.reveal(times[1] / times[0])
Markdown(f"**{times[1] / times[0]:.2f} times: {times[0] * 1e3:.2f} and {times[1] * 1e3:.2f} ms, with {2 * 64} tokens a step.**")

# %% [markdown]
# Look which lane ends last: not the link but Adam on the host. It reads and writes 28 bytes per parameter, at the pace of DRAM. The replay lets lanes run side by side; on a real GPU that takes *pinned* memory, copies of their own stream, and a thread for Adam.

# %% [markdown]
# Pinned memory is never swapped out, so the GPU may copy by itself. Here, where there is a GPU:

# %%
print(lab05.copies_table(lab05.copies()))
print(f"torch's fused AdamW goes through this machine's memory at {lab05.adam_bandwidth() / 1e9:.1f} GB/s")

# %% [markdown]
# ## 3 · When the host is full too
# A disk holds terabytes. *ZeRO-Infinity* (arXiv:2104.07857) keeps the state there, reads it before the update and writes it back.
#
# **Question.** Adam's state of a 7B model on one good drive (7 GB/s): how many seconds does a step read and write?

# %%
disk_guess = labkit.predict("5.disk", ..., "s")

# %%
llama = parameters(named("llama-2-7b"))
drive = NVME["Samsung 990 PRO"]
disk_guess.reveal(2 * 12 * llama / drive)
Markdown(f"**{2 * 12 * llama / drive:.0f} s for 12 bytes twice, of {llama / 1e9:.2f} billion parameters; four drives in a row {2 * 12 * llama / NVME['4 x Samsung 990 PRO']:.1f} s.**")

# %% [markdown]
# A file can be *mapped*: it looks like a tensor, and the kernel reads and writes pages as they are touched. What is mapped can be dropped from RAM at any time.

# %% [markdown]
# **Exercise 5.2: the state on disk** (15 min, core)
#
# `DiskAdam(parameters, folder, lr, betas, eps, weight_decay, chunk)`: AdamW after backward, master and moments in fp32 in files of `folder`, which is made if it is not there.
#
# - Opened again, also renamed and by another process, it goes on: moments, master, count.
# - RAM beside weights and gradients: pieces of `chunk` numbers, no whole tensors.
# - Too little room on the disk: before making files, an `OSError` that names the folder and the bytes needed. (A mapped file on a full disk would end the process by a signal.)
#
# <details><summary>Hint 1: a question</summary>
# After a restart, what else than the moments does the bias correction need?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>torch.from_file(path, shared=True, size=..., dtype=...)</code> makes the file where there is none; <code>p.view(-1)[at : at + chunk]</code>; <code>shutil.disk_usage(folder).free</code>.
# </details>


# %% exercise="5.2"
class DiskAdam:
    """AdamW whose state lies in files of a folder, and goes on from what is there."""

    def __init__(self, parameters, folder, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, chunk=2**16):
        # SOLUTION
        import shutil

        self.lr, self.betas, self.eps, self.weight_decay, self.chunk = lr, betas, eps, weight_decay, chunk
        self.parameters, self.state = [p for p in parameters if p.requires_grad], []
        os.makedirs(folder, exist_ok=True)
        paths = [os.path.join(folder, f"{number}.bin") for number in range(len(self.parameters))]
        needed = sum(4 + 12 * p.numel() for p, path in zip(self.parameters, paths, strict=True) if not os.path.exists(path))
        if needed > (free := shutil.disk_usage(folder).free):
            raise OSError(f"{folder} needs {needed} bytes for Adam's state, and {free} are free")
        for p, path in zip(self.parameters, paths, strict=True):
            new = not os.path.exists(path)
            flat = torch.from_file(path, shared=True, size=1 + 3 * p.numel(), dtype=torch.float32)
            count, (master, m, v) = flat[:1], flat[1:].view(3, -1)
            if new:  # a new file is full of zeros
                for at in range(0, p.numel(), chunk):
                    master[at : at + chunk] = p.detach().view(-1)[at : at + chunk]
            self.state.append((count, master, m, v))
        # END SOLUTION

    @torch.no_grad()
    def step(self):
        # SOLUTION
        b1, b2 = self.betas
        for p, (count, *rows) in zip(self.parameters, self.state, strict=True):
            if p.grad is None:
                continue
            count += 1
            t = count.item()
            for at in range(0, p.numel(), self.chunk):
                master, m, v = (row[at : at + self.chunk] for row in rows)
                grad = p.grad.view(-1)[at : at + self.chunk].float()
                m.lerp_(grad, 1 - b1)
                v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
                master.mul_(1 - self.lr * self.weight_decay)
                master.addcdiv_(m / (1 - b1**t), (v / (1 - b2**t)).sqrt_().add_(self.eps), value=-self.lr)
                p.view(-1)[at : at + self.chunk] = master
        # END SOLUTION

    def zero_grad(self):
        # SOLUTION
        for p in self.parameters:
            p.grad = None
        # END SOLUTION


# %%
labkit.check("5.2")

# %% [markdown]
# What the kernel says of a process after three updates of 8 million parameters: memory of its own, and pages of files.

# %%
OnDisk, note_2 = mine_or(DiskAdam, lab05.TorchOnDisk)
note_2 = note_2 and f" ({note_2})"
folder = tempfile.mkdtemp()
found = {
    "torch's AdamW": lab05.ram_of(lambda weights: torch.optim.AdamW(weights, foreach=False), 2**23),
    f"on disk{note_2}": lab05.ram_of(lambda weights: OnDisk(weights, folder), 2**23),
}
if None not in found.values():
    rows = [("its own", [r.anonymous / 1e6 for r in found.values()]), ("of files", [r.files / 1e6 for r in found.values()])]
    ax = curves.bars(rows, list(found), "MB more than before", "one process, three updates")
    plt.show()
on_disk = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))
Markdown(f"**{on_disk / 1e6:.0f} MB lie on disk, {on_disk / 2**23:.0f} bytes per parameter.**{note_2}")

# %% [markdown]
# Pages of files still sit in RAM while there is room; under pressure the kernel takes them, and cannot take the others. DeepSpeed goes past this cache with asynchronous I/O and pinned buffers.

# %% [markdown]
# ## 4 · What a step takes
# A line of stations, through which layers pass one after another: backward, the link down, Adam, the link up; with a disk, reading before Adam and writing after. Each station takes one layer at a time.

# %% [markdown]
# **Exercise 5.3: the time of a step** (10 min, core)
#
# `offload_step_time(num_parameters, layers, forward_s, backward_s, bandwidth, state, overlap)`, in seconds. bf16; equal layers; `bandwidth` in bytes/s by wire.
#
# - `state="device"`: forward, backward, then Adam's 28 bytes per parameter over `"hbm"`.
# - `"host"`: gradients down and weights up over `"pcie"`, 2 bytes each, both ways at once; Adam over `"dram"`.
# - `"disk"`: besides, 12 bytes read and 12 written over `"nvme"`, two stations.
# - `overlap`: layers follow one another, after forward. Else each station waits until the one before is all done.
#
# 10⁹ parameters, 20 layers, 0.1 s and 0.2 s, pcie 20e9, dram 100e9, on the host, overlapped: 0.4 s.
#
# <details><summary>Hint 1: a question</summary>
# When does the slowest station begin, and what is left when it is done?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# An assembly line: one piece through all stations, the others at the slowest one's pace.
# </details>


# %% exercise="5.3"
def offload_step_time(
    num_parameters: float, layers: int, forward_s: float, backward_s: float, bandwidth: dict, state: str, overlap: bool
) -> float:
    """Seconds of a step with Adam's state on the "device", the "host" or a "disk"."""
    # SOLUTION
    if state == "device":
        return forward_s + backward_s + 28 * num_parameters / bandwidth["hbm"]
    link, adam = 2 * num_parameters / bandwidth["pcie"], 28 * num_parameters / bandwidth["dram"]
    stations = [backward_s, link, adam, link]
    if state == "disk":
        stations += [12 * num_parameters / bandwidth["nvme"]] * 2
    if not overlap:
        return forward_s + sum(stations)
    return forward_s + (sum(stations) + (layers - 1) * max(stations)) / layers
    # END SOLUTION


# %%
labkit.check("5.3")

# %% [markdown]
# A 7B model on one A100. Tokens make backward longer, not the wires.
#
# **Question.** From how many tokens a step on is a step with offload at most a tenth longer than one on the device, had that room?

# %%
tokens_guess = labkit.predict("5.tokens", ..., "tokens")

# %%
step_time, note_3 = mine_or(offload_step_time, lab05.step_time_s)
note_3 = note_3 and f" ({note_3})"
a100 = lab05.Setup("llama-2-7b", "A100-80", "8 x DDR4-3200", "Samsung 990 PRO")
ways = {"on the device": ("device", False), "host": ("host", True), "host, no overlap": ("host", False), "disk": ("disk", True)}
seconds = {name: lab05.over_tokens(a100, *way, step_time=step_time) for name, way in ways.items()}
made = [curves.Curve(name, lab05.TOKENS, times, number=i) for i, (name, times) in enumerate(seconds.items())]
ax = curves.times(made, f"llama-2-7b on A100-80{note_3}")
ax.set(xlabel="tokens a step")
curves.doubling_axis(ax, lab05.TOKENS)
plt.show()
enough = next(t for t, a, b in zip(lab05.TOKENS, seconds["host"], seconds["on the device"], strict=True) if a <= 1.1 * b)
tokens_guess.reveal(enough)
Markdown(f"**{enough:,} tokens; with {lab05.TOKENS[0]:,} a step takes {seconds['host'][0] / seconds['on the device'][0]:.0f} times as long.**")

# %% [markdown]
# Offload costs a *fixed* time; more tokens a step hide it. That is why it suits one GPU with gradient accumulation, and not many with small batches.
#
# Try other models and machines. What must be changed so that the disk hides as well?

# %%
offload.offload()

# %% [markdown]
# ## 5 · Is it worth it?
# **Exercise 5.4: decide** (10 min, core)
#
# `pays_off(c, step_time)`: `"device"` where all fits there; else the fastest way that fits, or `"nowhere"`. ZeRO-2 among `c.gpus`: Ψ = `c.num_parameters`, and each GPU updates Ψ/gpus. Ask `step_time` (as 5.3) with that part.
#
# | way | each GPU, bytes | host | disk | time |
# |---|---|---|---|---|
# | `"device"` | 2Ψ + 14Ψ/gpus + activations | | | device |
# | `"recompute"` | recomputed_bytes instead | | | backward and a forward more |
# | `"host"` | 2Ψ + activations | 14Ψ | | host, overlapped |
# | `"disk"` | the same | 2Ψ | 12Ψ | disk, overlapped |
#
# <details><summary>Hint 1: a question</summary>
# The first way that fits is not always the fastest. What does recomputation cost, and what offload?
# </details>
# <details><summary>Hint 2: what to look up</summary>
# <code>c.hbm_bytes</code>, <code>c.host_bytes</code>, <code>c.disk_bytes</code> (of the node), <code>c.layers</code>, <code>c.forward_s</code>, <code>c.bandwidth</code>; <code>min(times, key=times.get)</code>.
# </details>


# %% exercise="5.4"
def pays_off(c, step_time) -> str:
    """Where a configuration should train: "device", "recompute", "host", "disk" or "nowhere"."""
    # SOLUTION
    n = c.num_parameters

    def seconds(state, more=0.0):
        backward_s, overlap = c.backward_s + more, state != "device"
        return step_time(n / c.gpus, c.layers, c.forward_s, backward_s, c.bandwidth, state, overlap)

    states, kept, again = 14 * n / c.gpus, c.activation_bytes, c.recomputed_bytes
    ways = {
        "device": (2 * n + states + kept, 0, 0, seconds("device")),
        "recompute": (2 * n + states + again, 0, 0, seconds("device", c.forward_s)),
        "host": (2 * n + kept, 14 * n, 0, seconds("host")),
        "disk": (2 * n + kept, 2 * n, 12 * n, seconds("disk")),
    }
    room = c.hbm_bytes, c.host_bytes, c.disk_bytes
    fits = {way: row[3] for way, row in ways.items() if all(need <= has for need, has in zip(row, room, strict=False))}
    return "device" if "device" in fits else min(fits, key=fits.get, default="nowhere")
    # END SOLUTION


# %%
labkit.check("5.4")

# %%
decide, note_4 = mine_or(pays_off, lambda c, step_time: pays.decide(c))
note_4 = note_4 and f" ({note_4})"
rows = []
for c in lab05.six():
    needs = pays.ways(c)
    rows.append((c.name, decide(c, lab05.step_time_s), *(f"{needs[way][0] / 1e9:.0f}" for way in pays.WAYS), f"{c.hbm_bytes / 1e9:.0f}"))
print(table(("configuration", f"decision{note_4}", *(f"{way}, GB" for way in pays.WAYS), "GPU, GB"), rows))
chosen = [row[1] for row in rows]
Markdown(f"**Of six, offload pays in {sum(way in ('host', 'disk') for way in chosen)}; {chosen.count('device')} needs nothing, {chosen.count('recompute')} recomputes, {chosen.count('nowhere')} fits nowhere.**")

# %% [markdown]
# A model that fits should stay: people [have been surprised](https://github.com/deepspeedai/DeepSpeed/issues/5795) that offload made a small one slower. Eight GPUs that divide the state beat a host that all share.
#
# ## 6 · DeepSpeed does the same
# Two ranks, five settings. On a CPU nothing is saved; what can be seen is that offload changes no loss.

# %%
print("Five engines on two ranks: about 20 s ...", flush=True)
runs = lab05.with_deepspeed()
for run in runs:
    print(f"{run.name:28s}", " ".join(f"{loss:.6f}" for loss in run.losses))
off = max(abs(a - b) for run in runs for a, b in zip(run.losses, runs[0].losses, strict=True))
Markdown(f"**Largest difference from stage 2 without offload: {off:.0e}, over {len(runs[0].losses)} steps.**")

# %% [markdown]
# To files DeepSpeed writes by its op `async_io`. It needs libaio and is compiled at first use, so this cell looks first and compiles nothing.

# %%
from labkit.model.deepspeed import async_io  # noqa: E402

found = async_io()
print(found.sentence)
if found.state == "built":
    with tempfile.TemporaryDirectory() as folder:
        plain, in_files = lab05.to_files(folder)
    off = max(abs(a - b) for a, b in zip(in_files.losses, plain.losses, strict=True))
    print(f"{in_files.folder_bytes / 1e6:.1f} MB in files; losses {off:.0e} from those without offload")

# %% [markdown]
# The same in a file, for a launcher:
#
# ```
# {"zero_optimization": {"stage": 3,
#    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true},
#    "offload_param": {"device": "cpu", "pin_memory": true}}}
#
# deepspeed --num_gpus 8 train.py --deepspeed_config ds_config.json
# ```
#
# Without `"optimizer"` of DeepSpeed's own (`DeepSpeedCPUAdam`, vectorised, compiled at first use) torch's runs on the host.
#
# ## 7 · What guides say
# Four claims from guides that are widely read, each with a figure:

# %%
for claim in lab05.claims():
    print(f"{claim.verdict}: {claim.said}\n    {claim.figure}")

# %% [markdown]
# | you wrote | torch and DeepSpeed have | remember |
# |---|---|---|
# | `OffloadedAdam` | FSDP2's `CPUOffloadPolicy`; `offload_optimizer: cpu` | 2 bytes down, 2 up, 28 through DRAM |
# | `DiskAdam` | `offload_optimizer: nvme` | 24 bytes per parameter and step |
# | `offload_step_time` | `labkit estimate MODEL --offload optimizer` | the slowest station sets the pace |
# | `pays_off` | the autotuner of DeepSpeed | what fits should stay |
#
# **An open question.** The weights themselves, 2 bytes per parameter, still have to fit on one GPU, and each product needs only a few of them. Instead of fetching them from the host, could several GPUs each keep a slice of every matrix, and compute with it? Lab 06 splits the product. (`labkit progress` in a terminal shows your points.)
