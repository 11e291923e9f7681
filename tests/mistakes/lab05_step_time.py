"""Answers to exercise 5.3, `offload_step_time`: wrong ones with the cause each must be told, right ones, cheats."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist


def _parts(n, backward_s, bandwidth, state, down=2, up=2, touched=28, moved=12):
    pcie, dram, nvme = bandwidth["pcie"], bandwidth["dram"], bandwidth["nvme"]
    disk = [moved * n / nvme] * 2 if state == "disk" else []
    return [backward_s, down * n / pcie, touched * n / dram, up * n / pcie, *disk]


def closed_form(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    if state == "device":
        return forward_s + backward_s + 28 * n / bandwidth["hbm"]
    parts = _parts(n, backward_s, bandwidth, state)
    if not overlap:
        return forward_s + sum(parts)
    return forward_s + (sum(parts) + (layers - 1) * max(parts)) / layers


def _with(**changes):
    def answer(n, layers, forward_s, backward_s, bandwidth, state, overlap):
        if state == "device":
            return forward_s + backward_s + changes.get("touched", 28) * n / bandwidth["hbm"]
        parts = _parts(n, backward_s, bandwidth, state, **changes)
        return forward_s + (sum(parts) + (layers - 1) * max(parts)) / layers if overlap else forward_s + sum(parts)

    return answer


gradients_only = _with(up=0)
in_fp32 = _with(down=4, up=4)
state_crosses = _with(down=14, up=14)
no_adam = _with(touched=0)
state_once = _with(touched=16)
state_only = _with(touched=24)
for name in ("gradients_only", "in_fp32", "state_crosses", "no_adam", "state_once", "state_only"):
    globals()[name].__name__ = name


def one_after_another(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    return closed_form(n, layers, forward_s, backward_s, bandwidth, state, False)


def always_overlapped(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    return closed_form(n, layers, forward_s, backward_s, bandwidth, state, True)


def slowest_alone(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    if state == "device" or not overlap:
        return closed_form(n, layers, forward_s, backward_s, bandwidth, state, overlap)
    return forward_s + max(_parts(n, backward_s, bandwidth, state))


def forward_hides_too(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    if state == "device" or not overlap:
        return closed_form(n, layers, forward_s, backward_s, bandwidth, state, overlap)
    first, *others = _parts(n, backward_s, bandwidth, state)
    return max(forward_s + first, *others)


def a_layer_too_many(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    if state == "device" or not overlap:
        return closed_form(n, layers, forward_s, backward_s, bandwidth, state, overlap)
    parts = _parts(n, backward_s, bandwidth, state)
    return forward_s + sum(parts) / layers + max(parts)


def free_on_the_device(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    if state == "device":
        return forward_s + backward_s
    return closed_form(n, layers, forward_s, backward_s, bandwidth, state, overlap)


def disk_is_no_slower(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    return closed_form(n, layers, forward_s, backward_s, bandwidth, "host" if state == "disk" else state, overlap)


def reads_only(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    if state != "disk":
        return closed_form(n, layers, forward_s, backward_s, bandwidth, state, overlap)
    parts = _parts(n, backward_s, bandwidth, state)[:-1]
    return forward_s + (sum(parts) + (layers - 1) * max(parts)) / layers if overlap else forward_s + sum(parts)


def both_ways_in_turn(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    if state == "device" or not overlap:
        return closed_form(n, layers, forward_s, backward_s, bandwidth, state, overlap)
    backward, down, adam, up, *disk = _parts(n, backward_s, bandwidth, state)
    parts = [backward, down + up, adam, *disk]
    return forward_s + (sum(parts) + (layers - 1) * max(parts)) / layers


def adam_at_hbm(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    return closed_form(n, layers, forward_s, backward_s, bandwidth | {"dram": bandwidth["hbm"]}, state, overlap)


def in_milliseconds(*question):
    return 1e3 * closed_form(*question)


def the_example(*question):
    return 0.4


def only_the_host(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    if state == "host":
        return closed_form(n, layers, forward_s, backward_s, bandwidth, state, overlap)


def disk_in_layers_of_its_own(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    time_s = closed_form(n, layers, forward_s, backward_s, bandwidth, "host" if state == "disk" else state, overlap)
    return time_s + (24 * n / bandwidth["nvme"] if state == "disk" else 0)


def forward_is_a_station(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    if state == "device" or not overlap:
        return closed_form(n, layers, forward_s, backward_s, bandwidth, state, overlap)
    parts = [forward_s, *_parts(n, backward_s, bandwidth, state)]
    return (sum(parts) + (layers - 1) * max(parts)) / layers


def state_only_on_the_host(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    answer = closed_form if state == "device" else state_only
    return answer(n, layers, forward_s, backward_s, bandwidth, state, overlap)


def no_master_on_disk(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    parts = {**bandwidth, "nvme": bandwidth["nvme"] * 12 / 8}
    return closed_form(n, layers, forward_s, backward_s, parts, state, overlap)


def disk_beside_the_device(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    wires = bandwidth | ({"pcie": float("inf")} if state == "disk" else {})
    return closed_form(n, layers, forward_s, backward_s, wires, state, overlap)


WRONG = [
    (forward_is_a_station, "forward_is_a_station"),
    (state_only_on_the_host, "state_only_on_host"),
    (no_master_on_disk, "master_not_on_disk"),
    (disk_beside_the_device, "disk_on_device"),
    (one_after_another, "never_overlaps"),
    (always_overlapped, "always_overlaps"),
    (slowest_alone, "perfect"),
    (forward_hides_too, "hides_forward"),
    (a_layer_too_many, "one_layer_more"),
    (gradients_only, "no_way_back"),
    (in_fp32, "wide"),
    (state_crosses, "state_over_pcie"),
    (no_adam, "adam_free"),
    (free_on_the_device, "device_adam_free"),
    (state_once, "state_once"),
    (state_only, "state_only"),
    (adam_at_hbm, "adam_on_device"),
    (both_ways_in_turn, "one_way_wire"),
    (reads_only, "reads_only"),
    (disk_is_no_slower, "disk_forgotten"),
    (in_milliseconds, "in_ms"),
    (the_example, "hard_coded"),
    (only_the_host, "not_a_number"),
    (disk_in_layers_of_its_own, "wrong_time"),
]


def layer_by_layer(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    """Each station's clock, one layer after another."""
    if state == "device":
        return forward_s + backward_s + 28 * n / bandwidth["hbm"]
    pieces = layers if overlap else 1
    backward, down, adam, up, *disk = [part / pieces for part in _parts(n, backward_s, bandwidth, state)]
    line = [backward, down, *disk[:1], adam, *disk[1:], up]
    free = [forward_s] + [0.0] * (len(line) - 1)
    for _ in range(pieces):
        ready = 0.0
        for i, part in enumerate(line):
            free[i] = ready = max(ready, free[i]) + part
    return free[-1]


def by_torch(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    if state == "device":
        return forward_s + backward_s + 28 * n / bandwidth["hbm"]
    parts = torch.tensor(_parts(n, backward_s, bandwidth, state), dtype=torch.float64)
    each = parts / (layers if overlap else 1)
    return (forward_s + each.sum() + ((layers - 1) * each.max() if overlap else 0)).item()


def wait_beyond_the_slowest(n, layers, forward_s, backward_s, bandwidth, state, overlap):
    """The slowest station works all the time; the others only for its first and last layer."""
    if state == "device":
        return closed_form(n, layers, forward_s, backward_s, bandwidth, state, overlap)
    parts = _parts(n, backward_s, bandwidth, state)
    others = sum(parts) - max(parts)
    return forward_s + max(parts) + others / (layers if overlap else 1)


RIGHT = [closed_form, layer_by_layer, by_torch, wait_beyond_the_slowest]


def reads_the_callers_frames(*question):
    frame = sys._getframe(1)
    while frame is not None:
        if "due" in frame.f_locals:
            return frame.f_locals["due"][0]
        frame = frame.f_back
    return closed_form(*question)


def asks_the_other_rank(*question):
    dist.all_reduce(torch.ones(1))
    return closed_form(*question)


def calls_the_judges_replay(*question):
    """labkit's own replay does the work."""
    from labkit.labs.lab05 import stations

    return stations.play(*question).time_s


def by_the_packages_own_name(*question):
    """The name that the notebook's next cell shows."""
    from labkit.labs import lab05

    return lab05.step_time_s(*question)


def by_a_path(*question):
    import labkit.labs.lab05 as offload

    return offload.step_time_s(*question)


def without_adam_everywhere(*question):
    return no_adam(*question)


def _patch_stations():
    from labkit.labs.lab05 import stations

    stations.TOUCHED = 0


without_adam_everywhere.notebook = _patch_stations


def writes_down_the_questions(*question):
    with open(os.path.join(tempfile.gettempdir(), "labkit-questions.txt"), "a") as file:
        file.write(f"{question}\n")
    return closed_form(*question)


class Agrees(float):
    def __sub__(self, other):
        return 0.0

    __rsub__ = __truediv__ = __rtruediv__ = __sub__


def agrees_with_everything(*question):
    return Agrees(1.0)


CHEATS = [
    (reads_the_callers_frames, "frame_read"),
    (asks_the_other_rank, "communication"),
    (calls_the_judges_replay, "ready_made"),
    (by_the_packages_own_name, "ready_made"),
    (by_a_path, "ready_made"),
    (without_adam_everywhere, "patched"),
    (writes_down_the_questions, "file_used"),
    (agrees_with_everything, ("not_a_number", "hard_coded", "unpicklable_result")),
]
