"""The peak of bytes allocated by torch.profiler, beside the record's: both watch one and the same region."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from labkit.record.trace import Trace


def both_peaks(run: Callable[[], object]) -> tuple[int, int]:
    """(record's peak above what was held on entry, profiler's peak) of `run()`, which makes all it uses."""
    run_once = Trace()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof, run_once:
        run()
    record = run_once.record
    return record.peak_bytes - record.begin_bytes, allocated_peak(prof)


def allocated_peak(prof: profile) -> int:
    """Highest sum of what is allocated at once.

    The profiler misses what another thread frees (gloo's, when it held a tensor last): such a block is taken
    as freed when its address is allocated anew.
    """
    changes = []

    def visit(events) -> None:
        for event in events:
            if event.tag == torch._C._profiler._EventType.Allocation:
                changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
            visit(event.children)

    visit(prof.profiler.kineto_results.experimental_event_tree())
    live: dict[int, int] = {}
    held = peak = 0
    for _, address, size in sorted(changes, key=lambda change: change[0]):
        held -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            held += size
        peak = max(peak, held)
    return peak
