"""The log that nccl-tests prints: an example of its format, written and read.

The format is that of `all_reduce_perf`, nccl-tests 2.13 to 2.16 (github.com/NVIDIA/nccl-tests, src/common.cu and
README.md): comments begin with #, times are in microseconds, bandwidths in GB/s of 1e9 bytes. The example was NOT
measured: its times are those of this course's cost model for one DGX H100 (8 GPUs, NVLink 4), ring algorithm.
Left out: other tests' logs, whose columns differ little, and the in-place columns when reading.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_GPUS, SIZES = 8, tuple(2**power for power in range(10, 33, 2))  # 1 KiB to 4 GiB
_HEAD = """\
# nThread 1 nGpus 8 minBytes 1024 maxBytes 4294967296 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 \
validation: 1 graph: 0
#
# Using devices
{devices}
#
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       
"""  # noqa: W291


@dataclass(frozen=True)
class Row:
    """One size of a log: out-of-place columns. Bytes, seconds, bytes per second."""

    num_bytes: int
    time_s: float
    algbw: float
    busbw: float


def example() -> str:
    """A log of all_reduce_perf as one DGX H100 would print it if it ran exactly as the cost model says."""
    from labkit.cost import comm, groups, hardware

    group = groups.on_cluster(hardware.cluster("DGX H100"))
    device = "#  Rank {0:2} Group  0 Pid {1:6} on    example device  {0} [0x{2:02x}] NVIDIA H100 80GB HBM3"
    devices = "\n".join(device.format(rank, 4000 + rank, 0x1B + 16 * rank) for rank in range(NUM_GPUS))
    lines, rates = [], []
    for size in SIZES:
        time_s = comm.group_time_s("all_reduce", size, group, "ring")
        rates.append(comm.busbw("all_reduce", size, NUM_GPUS, time_s))
        cells = f"  {_micros(time_s)}  {size / time_s / 1e9:6.2f}  {rates[-1] / 1e9:6.2f}  {0:5}"
        lines.append(f"{size:12}  {size // 4:12}  {'float':>8}  {'sum':>6}  {-1:6}{cells}{cells}")
    mean = sum(rates) / len(rates) / 1e9
    tail = f"# Out of bounds values : 0 OK\n# Avg bus bandwidth    : {mean:g} \n#\n"
    return _HEAD.format(devices=devices) + "\n".join(lines) + "\n" + tail


def read(text: str) -> list[Row]:
    """The rows of a log, out-of-place columns. ValueError for a text without any."""
    rows = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 8 and words[0].isdecimal() and words[1].isdecimal():
            time_us, algbw, busbw = (float(word) for word in words[5:8])
            rows.append(Row(int(words[0]), time_us * 1e-6, algbw * 1e9, busbw * 1e9))
    if not rows:
        raise ValueError("this text has no rows of numbers as nccl-tests prints them")
    return rows


def _micros(time_s: float) -> str:
    """Microseconds in seven places, as nccl-tests rounds them."""
    micros = time_s * 1e6
    return f"{micros:7.0f}" if micros >= 1e4 else f"{micros:7.1f}" if micros >= 100 else f"{micros:7.2f}"
