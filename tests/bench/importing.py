"""What `import labkit` adds to the start of a Python, and that it brings no torch."""

import statistics
import subprocess
import sys
import time

ROUNDS = 15


def main() -> None:
    """Print the medians of fresh interpreters with and without the import, taken in turn."""
    bare, light = [], []
    for _ in range(ROUNDS):
        bare.append(started("pass"))
        light.append(started("import labkit, sys; assert 'torch' not in sys.modules"))
    added_s = statistics.median(light) - statistics.median(bare)
    print(f"import labkit: {added_s * 1000:.1f} ms on top of python's own {statistics.median(bare) * 1000:.1f} ms")


def started(code: str) -> float:
    """Seconds until a fresh interpreter has run `code`."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin
