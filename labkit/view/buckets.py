"""The bucket explorer: bucket size, link and ranks against the time of a step, from one's own recorded backward.

Above, what a rank and its network do, all_reduces one by one after backward and in buckets during it; below, the time
of the step over the size of a bucket. Both in percent of the step that averages one by one, so that the axes stay as
they are. Left out: the arithmetic, which is `labkit.labs.lab02.recut`, and ranks that differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.cost import groups, hardware
from labkit.cost.parts import Cluster, Device, Link
from labkit.labs.lab02.recorded import Step
from labkit.labs.lab02.recut import Backward, Cut, backward_of, one_by_one, recut
from labkit.view import curves, explore
from labkit.view.plot import COLOURS, edge_widths, joined

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = tuple(2**power for power in range(12, 26))  # 4 KiB to 32 MiB
RANKS = (2, 4, 8, 16, 32, 64)
LINKS = ("PCIe 3", "PCIe 4", "NVLink 3", "NVLink 4", "100 GbE", "25 GbE", "10 GbE")
DEVICES = ("T4", "RTX 4090", "A100-40", "H100")
MOST = 130.0  # percent of the axes
LANES = ("one by one", "its network", "in buckets", "its network")


def buckets(step: Step, also: Cluster | None = None, **start: Any) -> explore.Explorer:
    """An explorer of a recorded step that averages after backward (`record_step`).

    also: one more cluster to take a device and a link from, e.g. this laptop's. start: values of controls to start
    with (bucket_bytes, ranks, link, device). Raises ValueError as `backward_of`.
    """
    links = {name: hardware.link(name) for name in LINKS}
    devices = {name: hardware.device(name) for name in DEVICES}
    if also is not None:
        links[also.node.intra.name], devices[also.node.device.name] = also.node.intra, also.node.device
    backwards = {name: backward_of(step, device) for name, device in devices.items()}
    begin = {"bucket_bytes": 2**21, "ranks": 4, "link": "PCIe 3", "device": "T4"} | start
    controls = {
        "bucket_bytes": explore.slider("bucket size", SIZES, begin["bucket_bytes"], curves.as_size),
        "ranks": explore.slider("ranks", RANKS, begin["ranks"]),
        "link": explore.choice("link", tuple(links), begin["link"]),
        "device": explore.choice("device", tuple(devices), begin["device"]),
    }
    figure, draw = _picture()

    def update(bucket_bytes: int, ranks: int, link: str, device: str) -> None:
        draw(*cuts(backwards[device], devices[device], links[link], ranks), bucket_bytes, backwards[device])

    return explore.explorer(controls, figure, update)


@functools.lru_cache(maxsize=64)
def cuts(backward: Backward, device: Device, link: Link, ranks: int) -> tuple[Cut, dict[int, Cut]]:
    """The step one by one, and by size of a bucket, on so many ranks joined by one kind of link."""
    group = groups.on_link(ranks, link)
    return one_by_one(backward, device, group), {size: recut(backward, size, device, group) for size in SIZES}


def reading(naive: Cut, cut: Cut, bucket_bytes: float) -> str:
    """What is set, in words."""
    count = len(cut.buckets)
    return (
        f"{curves.as_size(bucket_bytes)}: {count} bucket{'s' * (count != 1)}, {curves.as_time(cut.time_s)} a step, "
        f"{curves.as_time(cut.exposed_s) if cut.exposed_s else 'nothing'} exposed; "
        f"one by one {curves.as_time(naive.time_s)}, {curves.as_time(naive.exposed_s)} exposed"
    )


def bars(cut: Cut, backward: Backward) -> list[tuple[int, float, float, str]]:
    """(lane, start_s, end_s, kind) of a step: lane 0 computes, lane 1 is its network."""
    computing = [(0.0, backward.forward_s, "forward")]
    now = backward.forward_s
    for start_s, end_s in (*cut.busy, (cut.time_s, cut.time_s)):
        computing += [(now, start_s, "waiting"), (start_s, end_s, "backward")]
        now = end_s
    sent = [(1, bucket.start_s, bucket.end_s, "communication") for bucket in cut.buckets]
    return [(0, *span) for span in joined(computing)] + sent


def _picture() -> tuple[Figure, Callable[..., None]]:
    """The figure, and the function that sets its artists."""
    figure, lanes, curve = _axes()
    kinds = ("forward", "backward", "waiting", "communication")
    held = {kind: _empty_bars(lanes, kind) for kind in kinds}
    ink, dots = COLOURS["ink"], {"linestyle": ":", "linewidth": 1.2}
    (line,) = curve.plot(SIZES, [1.0] * len(SIZES), color="#0072B2", linewidth=1.8, label="in buckets,\nby size")
    floor = curve.axhline(0, color=ink, label="computing\nalone", **dots)
    (mark,) = curve.plot([], [], marker="o", markersize=9, markerfacecolor="none", color=ink)
    curve.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for artist in (*held.values(), line, floor, mark, lanes.title):
        artist.set_animated(True)
    lanes.legend(handles=list(held.values()), fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    def draw(naive: Cut, by_size: dict[int, Cut], bucket_bytes: int, backward: Backward) -> None:
        cut, whole_s = by_size[bucket_bytes], naive.time_s / 100
        both = [*bars(naive, backward), *((2 + lane, *rest) for lane, *rest in bars(cut, backward))]
        for kind, artist in held.items():
            held_now = [(lane, a / whole_s, b / whole_s) for lane, a, b, each in both if each == kind]
            artist.set_verts([_box(*each) for each in held_now])
            artist.set_linewidths(edge_widths([(right - left) / MOST for _, left, right in held_now]) or [0.4])
        line.set_ydata([by_size[size].time_s / whole_s for size in SIZES])
        floor.set_ydata([backward.compute_s / whole_s] * 2)
        mark.set_data([bucket_bytes], [cut.time_s / whole_s])
        lanes.set_title(reading(naive, cut, bucket_bytes), fontsize=9)

    return figure, draw


def _axes() -> tuple[Any, Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.6), dpi=explore.DPI, layout="constrained")
    lanes, curve = figure.subplots(2, 1, height_ratios=(1, 1))
    lanes.set(xlim=(0, MOST), ylim=(3.55, -0.55), xlabel="time, in % of one by one", title=" ")
    lanes.set_yticks(range(4), LANES)
    lanes.tick_params(axis="y", length=0)
    lanes.spines[:].set_visible(False)
    curves.size_axis(curve, SIZES[0], SIZES[-1])
    curve.set(xlabel="bucket size", ylabel="step (%)", ylim=(0, MOST))
    curve.grid(color=COLOURS["idle"], linewidth=0.8)
    curve.spines[["top", "right"]].set_visible(False)
    return figure, lanes, curve


def _empty_bars(ax: Any, kind: str) -> Any:
    from matplotlib.collections import PolyCollection

    made = PolyCollection([], facecolors=COLOURS[kind], edgecolors=COLOURS["ink"], linewidths=0.4, label=kind)
    return ax.add_collection(made, autolim=False)


def _box(lane: int, left: float, right: float) -> Sequence[tuple[float, float]]:
    low, high = lane - 0.36, lane + 0.36
    return (left, low), (right, low), (right, high), (left, high)
