"""A launch of 4 warm ranks with one all_reduce against `torchrun --nproc-per-node 4` of the same, in turn."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from labkit.ranks.launch import launch

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1000)
dist.all_reduce(x)
assert x[0] == 4
dist.destroy_process_group()
"""


def summed() -> float:
    """The same as SCRIPT's."""
    import torch
    import torch.distributed as dist

    x = torch.ones(1000)
    dist.all_reduce(x)
    return x[0].item()


def timed(action) -> float:
    """Seconds that `action` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main(rounds: int = 7) -> None:
    """Print both medians and their ratio; also the first launch, which imports torch, and 8 ranks."""
    first = timed(lambda: launch(summed, 4))
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "same.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(script)]
        quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pairs = []
        for _ in range(rounds):
            warm = timed(lambda: launch(summed, 4))
            pairs.append((warm, timed(lambda: subprocess.run(command, env=environ, **quiet))))
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    eight = statistics.median(timed(lambda: launch(summed, 8)) for _ in range(rounds))
    print(f"first launch of 4 ranks (imports torch)  {first:6.2f} s")
    print(f"warm launch of 4 ranks with all_reduce   {ours:6.3f} s   median of {rounds}")
    print(f"torchrun --nproc-per-node 4 of the same  {theirs:6.3f} s   median of {rounds}")
    print(f"torchrun / launch                        {theirs / ours:6.1f} x  (to be at least 10)")
    print(f"warm launch of 8 ranks                   {eight:6.3f} s   {eight / ours:.1f} x that of 4")


if __name__ == "__main__":
    main()
