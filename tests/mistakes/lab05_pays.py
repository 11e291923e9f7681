"""Answers to exercise 5.4, `pays_off`: wrong ones with the cause each must be told, right ones, cheats."""

import random
import sys

from labkit.labs import lab05
from labkit.labs.lab05 import pays


def _ways(c, step_time, state=14, divided=True, weights=2, again=True, overlap=True, node=True, host=14, disk=(2, 12)):
    part = c.num_parameters / (c.gpus if divided else 1)
    own = c.num_parameters / c.gpus
    everyone = c.num_parameters if node else own

    def time_s(state, more=0.0):
        return step_time(own, c.layers, c.forward_s, c.backward_s + more, c.bandwidth, state, overlap)

    base = weights * c.num_parameters
    return {
        "device": (base + state * part + c.activation_bytes, 0, 0, time_s("device")),
        "recompute": (base + state * part + c.recomputed_bytes, 0, 0, time_s("device", c.forward_s if again else 0)),
        "host": (base + c.activation_bytes, host * everyone, 0, time_s("host")),
        "disk": (base + c.activation_bytes, disk[0] * everyone, disk[1] * everyone, time_s("disk")),
    }


def _fits(c, way):
    return way[0] <= c.hbm_bytes and way[1] <= c.host_bytes and way[2] <= c.disk_bytes


def _fastest(c, ways):
    if _fits(c, ways["device"]):
        return "device"
    times = {name: way[3] for name, way in ways.items() if _fits(c, way)}
    return min(times, key=times.get, default="nowhere")


def device_or_the_fastest(c, step_time):
    return _fastest(c, _ways(c, step_time))


def fastest_that_fits(c, step_time):
    times = {name: way[3] for name, way in _ways(c, step_time).items() if _fits(c, way)}
    return min(times, key=times.get, default="nowhere")


def first_that_fits(c, step_time):
    return next((name for name, way in _ways(c, step_time).items() if _fits(c, way)), "nowhere")


def fastest_of_all(c, step_time):
    ways = _ways(c, step_time)
    return min(ways, key=lambda name: ways[name][3])


def never_recomputes(c, step_time):
    ways = _ways(c, step_time)
    del ways["recompute"]
    return _fastest(c, ways)


def without_gradients(c, step_time):
    return _fastest(c, _ways(c, step_time, state=12))


def without_master(c, step_time):
    return _fastest(c, _ways(c, step_time, state=10))


def state_whole_on_each(c, step_time):
    return _fastest(c, _ways(c, step_time, divided=False))


def recomputation_is_free(c, step_time):
    return _fastest(c, _ways(c, step_time, again=False))


def nothing_overlaps(c, step_time):
    return _fastest(c, _ways(c, step_time, overlap=False))


def host_of_one_gpu(c, step_time):
    return _fastest(c, _ways(c, step_time, node=False))


def host_without_end(c, step_time):
    ways = {name: (way[0], 0, way[2], way[3]) for name, way in _ways(c, step_time).items()}
    return _fastest(c, ways)


def disk_without_end(c, step_time):
    return _fastest(c, {name: (way[0], way[1], 0, way[3]) for name, way in _ways(c, step_time).items()})


def disk_without_host(c, step_time):
    ways = _ways(c, step_time)
    return _fastest(c, ways | {"disk": (ways["disk"][0], 0, *ways["disk"][2:])})


def without_activations(c, step_time):
    import dataclasses

    return device_or_the_fastest(dataclasses.replace(c, activation_bytes=0, recomputed_bytes=0), step_time)


def weights_twice(c, step_time):
    return _fastest(c, _ways(c, step_time, state=16))


def recomputes_with_offload_for_nothing(c, step_time):
    ways = _ways(c, step_time)
    less = c.recomputed_bytes - c.activation_bytes
    return _fastest(c, ways | {name: (ways[name][0] + less, *ways[name][1:]) for name in ("host", "disk")})


def host_without_gradients(c, step_time):
    return _fastest(c, _ways(c, step_time, host=12))


def all_on_disk(c, step_time):
    return _fastest(c, _ways(c, step_time, disk=(0, 14)))


def never_nowhere(c, step_time):
    way = device_or_the_fastest(c, step_time)
    return "disk" if way == "nowhere" else way


def has_a_step_time_of_its_own(c, step_time):
    """Seconds by heart, not by the function that is handed in."""

    def own(n, layers, forward_s, backward_s, bandwidth, state, overlap):
        if state == "device":
            return forward_s + backward_s + 28 * n / bandwidth["hbm"]
        stations = [backward_s, 2 * n / bandwidth["pcie"], 28 * n / bandwidth["dram"], 2 * n / bandwidth["pcie"]]
        stations += [12 * n / bandwidth["nvme"]] * 2 if state == "disk" else []
        each = [time_s / (layers if overlap else 1) for time_s in stations]
        return forward_s + sum(each) + ((layers - 1) * max(each) if overlap else 0)

    return device_or_the_fastest(c, own)


def always_offloads(c, step_time):
    return "host"


def yes_or_no(c, step_time):
    return device_or_the_fastest(c, step_time) in ("host", "disk")


def by_the_size_of_the_model(c, step_time):
    return "device" if c.num_parameters < 2e9 else "host" if c.num_parameters < 1e10 else "disk"


WRONG = [
    (fastest_that_fits, "device_left"),
    (first_that_fits, "first_that_fits"),
    (fastest_of_all, ("memory_forgotten", "wrong_decisions")),
    (never_recomputes, "never_recomputes"),
    (without_gradients, "gradients_forgotten"),
    (without_master, "master_forgotten"),
    (state_whole_on_each, ("whole_state", "wrong_decisions")),
    (recomputation_is_free, "free"),
    (nothing_overlaps, "no_overlap"),
    (host_of_one_gpu, "host_of_one_gpu"),
    (host_without_end, "host_without_end"),
    (disk_without_end, "disk_without_end"),
    (disk_without_host, "disk_without_host"),
    (without_activations, "no_activations"),
    (weights_twice, "weights_twice"),
    (recomputes_with_offload_for_nothing, "host_recomputes"),
    (host_without_gradients, "host_without_gradients"),
    (all_on_disk, "all_on_disk"),
    (never_nowhere, "never_nowhere"),
    (has_a_step_time_of_its_own, "own_time"),
    (always_offloads, "always_the_same"),
    (yes_or_no, "not_a_way"),
    (by_the_size_of_the_model, "wrong_decisions"),
]


def sorted_by_time(c, step_time):
    ways = _ways(c, step_time)
    for name, way in sorted(ways.items(), key=lambda item: 0 if item[0] == "device" else item[1][3]):
        if _fits(c, way):
            return name
    return "nowhere"


def asks_only_for_what_fits(c, step_time):
    """Times are worked out only for ways that fit."""
    n, best = c.num_parameters, ("nowhere", float("inf"))
    on_gpu, left = 2 * n + 14 * n / c.gpus, 2 * n + c.activation_bytes <= c.hbm_bytes
    question = n / c.gpus, c.layers, c.forward_s
    for name, fits, state, more in (
        ("device", on_gpu + c.activation_bytes <= c.hbm_bytes, "device", 0),
        ("recompute", on_gpu + c.recomputed_bytes <= c.hbm_bytes, "device", c.forward_s),
        ("host", left and 14 * n <= c.host_bytes, "host", 0),
        ("disk", left and 2 * n <= c.host_bytes and 12 * n <= c.disk_bytes, "disk", 0),
    ):
        if fits:
            time_s = step_time(*question, c.backward_s + more, c.bandwidth, state, True)
            time_s = 0.0 if name == "device" else time_s
            best = min(best, (name, time_s), key=lambda pair: pair[1])
    return best[0]


def by_a_table(c, step_time):
    ways = _ways(c, step_time)
    rows = sorted((name != "device", way[3], name) for name, way in ways.items() if _fits(c, way))
    return rows[0][2] if rows else "nowhere"


def by_names_that_labkit_has_too(c, step_time):
    """Names of its own, and attributes, that are called as parts of labkit are."""
    own = Named(pays=_ways(c, step_time))
    return _fastest(c, own.pays)


class Named:
    def __init__(self, **ways):
        self.__dict__.update(ways)


RIGHT = [by_names_that_labkit_has_too, device_or_the_fastest, sorted_by_time, asks_only_for_what_fits, by_a_table]


def asks_labkit(c, step_time):
    return pays.decide(c)


def takes_labkits_ways(c, step_time):
    fits = {name: way[3] for name, way in pays.ways(c).items() if _fits(c, way)}
    return "device" if "device" in fits else min(fits, key=fits.get, default="nowhere")


def asks_labkits_step_time(c, step_time):
    return device_or_the_fastest(c, lab05.step_time_s)


def guesses(c, step_time):
    return random.choice(("device", "recompute", "host", "disk", "nowhere"))


def knows_the_six(c, step_time):
    return {"gpt2 on one T4": "device", "llama-2-13b on one RTX 4090": "nowhere"}.get(c.name, "host")


def asks_the_judge(c, step_time):
    """Calls what the judge decides by."""
    frame = sys._getframe(1)
    while frame is not None:
        if "due" in frame.f_locals:
            return frame.f_locals["due"].pop(0)
        frame = frame.f_back
    return device_or_the_fastest(c, step_time)


class AnyWay(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


def equal_to_all(c, step_time):
    return AnyWay("host")


def host_is_due(c, step_time):
    return "host"


def _patch_decision():
    from labkit.labs.lab05 import pays

    pays.decide = lambda c, mistake="": "host"


host_is_due.notebook = _patch_decision


CHEATS = [
    (asks_labkit, "ready_made"),
    (takes_labkits_ways, "ready_made"),
    (asks_labkits_step_time, "ready_made"),
    (guesses, "wrong_decisions"),
    (knows_the_six, "wrong_decisions"),
    (asks_the_judge, "frame_read"),
    (equal_to_all, ("not_a_way", "always_the_same", "unpicklable_result")),
    (host_is_due, "patched"),
]
