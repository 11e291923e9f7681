"""Pictures of bytes held: over time as stacked areas by kind, and the list of owners at the peak as bars.

Data come from `labkit.record.held`; nothing is recorded here. Left out: explorers, and an allocator's own figures,
which are five numbers and need no picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from labkit.ranks.places import readable
from labkit.view.plot import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labkit.record.held import Held, Owner

# Kinds from the bottom up: what stays lies under what comes and goes. With the legend's word and the colour.
KIND_LOOKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "parameter": ("parameters", COLOURS["parameters"]),
        "optimizer": ("optimizer", COLOURS["optimizer"]),
        "buffer": ("module buffers", COLOURS["mixed"]),
        "gradient": ("gradients", COLOURS["gradients"]),
        "communication": ("communication buffers", COLOURS["buffers"]),
        "activation": ("activations", COLOURS["activations"]),
        "temporary": ("temporary", COLOURS["idle"]),
    }
)


def over_time(held: Held, title: str = "", ax: Axes | None = None) -> Axes:
    """Bytes held by kind over a recorded region, stacked; a dashed line marks the peak and says how much it is.

    Kinds that never have 0.1 % of the peak are left out of the legend. Returns the Axes.
    """
    ax = ax or _new_axes(6.8, 3.2)
    unit, size = unit_of(held.peak_bytes)
    last_ms = held.times_s[-1] * 1e3
    times = [time_s * 1e3 for time_s in held.times_s]
    kinds = [kind for kind in KIND_LOOKS if any(held.by_kind[kind])]
    lines = [[num_bytes / size for num_bytes in held.by_kind[kind]] for kind in kinds]
    areas = ax.stackplot(times, *lines, colors=[KIND_LOOKS[kind][1] for kind in kinds], step="post") if kinds else []
    seen = []
    for kind, area in zip(kinds, areas, strict=True):
        area.set(label=KIND_LOOKS[kind][0], linewidth=0)
        if max(held.by_kind[kind]) >= 0.001 * held.peak_bytes:
            seen.append(area)
    peak_ms, peak = held.peak_time_s * 1e3, held.peak_bytes / size
    ax.axvline(peak_ms, color=COLOURS["ink"], linewidth=1.2, linestyle="--", clip_on=False)
    right = peak_ms > 0.6 * last_ms
    ax.annotate(
        f"peak {peak:.3g} {unit}", (peak_ms, peak), (-5 if right else 5, 3), textcoords="offset points",
        ha="right" if right else "left", va="bottom", fontsize=9, color=COLOURS["ink"],
    )  # fmt: skip
    ax.set(xlim=(0, last_ms or 1), ylim=(0, 1.14 * peak or 1), xlabel="time (ms)", ylabel=f"bytes held ({unit})")
    ax.set_title(title, fontsize=10)
    ax.legend(handles=seen[::-1], fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def owners(at_peak: Sequence[Owner], title: str = "", ax: Axes | None = None, most: int = 12) -> Axes:
    """Who holds bytes at the peak: one bar a line of `at_peak`, the largest on top, coloured by kind.

    A bar says its bytes and, where known, the op and the line that made it. At most `most` bars. Returns the Axes.
    """
    from matplotlib.patches import Patch

    rows = list(at_peak)[:most]
    ax = ax or _new_axes(7.6, 0.9 + 0.28 * len(rows))
    largest = max((row.num_bytes for row in rows), default=0)
    unit, size = unit_of(largest)
    for place, row in enumerate(rows):
        length = row.num_bytes / size
        ax.barh(place, length, 0.72, color=KIND_LOOKS[row.kind][1], edgecolor=COLOURS["ink"], linewidth=0.4)
        ax.text(length, place, f" {_said(row, unit, size)}", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)), [row.module or "(no module)" for row in rows], fontsize=8)
    ax.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.75 * largest / size or 1), xlabel=f"bytes at the peak ({unit})")
    ax.set_title(title, fontsize=10)
    kinds = [kind for kind in KIND_LOOKS if any(row.kind == kind for row in rows)]
    patches = [Patch(facecolor=KIND_LOOKS[k][1], edgecolor=COLOURS["ink"], linewidth=0.4, label=KIND_LOOKS[k][0])
               for k in kinds]  # fmt: skip
    ax.legend(handles=patches, fontsize=8, frameon=False, loc="lower right")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return ax


def unit_of(num_bytes: float) -> tuple[str, float]:
    """(unit, its bytes) in which a figure of that size is read best: B, kB, MB, GB or TB, powers of 1000."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return unit, size
    return "B", 1.0


def _said(row: Owner, unit: str, size: float) -> str:
    count = f", {row.count} tensors" if row.count > 1 else ""
    op = row.op.removeprefix("aten.").split(".")[0]
    made = f"  {op}" if op else ""
    where = f" at {readable(row.place)}" if row.place else ""
    return f"{row.num_bytes / size:.3g} {unit}{count}{made}{where}"


def _new_axes(width: float, height: float) -> Axes:
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    return ax
