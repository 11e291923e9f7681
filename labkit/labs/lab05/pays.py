"""Judge of exercise 5.4, `pays_off`: the device if all fits there, else the fastest way that fits.

For six named configurations and random ones.
Each way has bytes on the device, the host and the disk, and a step time, which a function gives that is handed in:
`stations.step_time_s`, then `dear_offload`, which decides some of them otherwise. Decisions are compared
one by one; a wrong set is recognised by what known mistakes decide.
Left out: configurations in which two ways are nearly as fast, and those within a thousandth of an edge.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import labkit.labs.lab05.asked as asked_of
import labkit.labs.lab05.configurations as configurations
import labkit.labs.lab05.stations as stations
from labkit.check import evidence
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab05.configurations import Configuration

NAME = "pays_off"
WAYS = ("device", "recompute", "host", "disk")
NOWHERE = "nowhere"
COUNT, LEAST, CLEAR = 40, 4, 0.02  # random ones; of each answer at least; how much faster the fastest must be
DEAR = 40.0  # times as long an offloaded step takes, by the other step_time


def judge(fn: Callable, seed: int) -> Verdict:
    """The six first, then random ones."""
    asked = [*configurations.six(), *chosen(random.Random(seed))]
    seen = evidence.observe(_answers, 1, args=(fn, asked))
    failed = attempts.ran(seen, NAME, asked[0].name)
    if failed is not None:
        return failed
    (answers, others), due = seen.results[0], [decide(each) for each in asked]
    for each, answer in zip(asked, answers, strict=True):
        if type(answer) is not str or answer not in (*WAYS, NOWHERE):
            sentence = f"the answer is one of {', '.join(WAYS)} and {NOWHERE}."
            return wrong("shape", "not_a_way", sentence, _told(each), answer, "one of these five")
    wrong_ones = [number for number, (a, d) in enumerate(zip(answers, due, strict=True)) if a != d]
    if wrong_ones:
        first = wrong_ones[0]
        cause, sentence = _known(asked, answers) or _which(answers, due)
        sentence = f"{len(wrong_ones)} of {len(asked)} are decided otherwise: {sentence}"
        return wrong("values", cause, sentence, _told(asked[first]), answers[first], due[first])
    found = _own_time(asked, others) or evidence.no_communication(seen, asked[0].name) or honest(seen, asked[0].name)
    counts = Counter(due)
    return found or right(f"{len(asked)} decisions: " + ", ".join(f"{counts[way]} {way}" for way in (*WAYS, NOWHERE)))


def _own_time(asked: list[Configuration], answers: list[str]) -> Verdict | None:
    """The answers with `dear_offload`, all those with the usual step_time being right."""
    for each, answer in zip(asked, answers, strict=True):
        due = decide(each, "dear_offload")
        if answer != due and clear(each, "dear_offload"):
            sentence = "seconds come from the step_time that is handed in: with another, slower where state is not on "
            sentence += "the device, the decision is another one."
            return wrong("values", "own_time", sentence, _told(each), answer, due)
    return None


def dear_offload(
    num_parameters: float, layers: int, forward_s: float, backward_s: float, bandwidth: dict, state: str,
    overlap: bool = True,
) -> float:  # fmt: skip
    """Seconds as `stations.step_time_s` has them, DEAR times as many with the state on host or disk."""
    time_s = stations.step_time_s(num_parameters, layers, forward_s, backward_s, bandwidth, state, overlap)
    return time_s * (1.0 if state == "device" else DEAR)


def chosen(rng: random.Random) -> list[Configuration]:
    """COUNT random configurations with a clear decision, at least LEAST of each, on which every known mistake shows."""
    found = _drawn(rng)
    for mistake in _SENTENCES:
        while not any(decide(each, mistake) != decide(each) for each in found):
            found += [c for c in configurations.some(rng, 20) if clear(c) and decide(c, mistake) != decide(c)][:1]
    return found


def _drawn(rng: random.Random) -> list[Configuration]:
    found: list[Configuration] = []
    counts: Counter = Counter()
    while len(found) < COUNT:
        for each in configurations.some(rng, 20):
            way = decide(each)
            open_ = sum(max(0, LEAST - counts[other]) for other in (*WAYS, NOWHERE) if other != way)
            if len(found) < COUNT - open_ and clear(each):
                found.append(each)
                counts[way] += 1
    return rng.sample(found, len(found))


@functools.lru_cache(maxsize=4096)
def _step_time_s(number: float, layers: int, times: tuple, wires: tuple, state: str, overlap: bool) -> float:
    return stations.step_time_s(number, layers, *times, dict(wires), state, overlap)


def ways(c: Configuration, mistake: str = "") -> dict[str, tuple[float, float, float, float]]:
    """Per way: bytes on one device, on the host and on the disk (of the whole node), and seconds of a step."""
    part = c.num_parameters / (1 if mistake == "whole_state" else c.gpus)
    weights = c.num_parameters * 2 / (c.gpus if mistake == "weights_divided" else 1)
    states = {"gradients_forgotten": 12, "master_forgotten": 10, "weights_twice": 16}.get(mistake, 14) * part
    kept, again = c.activation_bytes, c.recomputed_bytes
    if mistake == "no_activations":
        kept = again = 0
    all_states = 14 * c.num_parameters / (c.gpus if mistake == "host_of_one_gpu" else 1)
    gradients = 0 if mistake in ("disk_without_host", "all_on_disk") else all_states / 7
    on_host = all_states * (6 / 7 if mistake == "host_without_gradients" else 1)
    on_disk = all_states * (1 if mistake == "all_on_disk" else 6 / 7)
    on_device, kept = kept, again if mistake == "host_recomputes" else kept
    offloaded = weights + kept + (2 * part if mistake == "gradients_stay" else 0)

    def time_s(state: str, again_s: float = 0.0) -> float:
        overlap = state != "device" and mistake != "no_overlap"
        number = c.num_parameters if mistake == "whole_time" else c.num_parameters / c.gpus
        times = c.forward_s, c.backward_s + again_s
        time_s = _step_time_s(number, c.layers, times, tuple(c.bandwidth.items()), state, overlap)
        return time_s * (DEAR if mistake == "dear_offload" and state != "device" else 1.0)

    return {
        "device": (weights + states + on_device, 0, 0, time_s("device")),
        "recompute": (weights + states + again, 0, 0, time_s("device", 0 if mistake == "free" else c.forward_s)),
        "host": (offloaded, on_host, 0, time_s("host")),
        "disk": (offloaded, gradients, on_disk, time_s("disk")),
    }


def decide(c: Configuration, mistake: str = "") -> str:
    """The decision that is due; with a mistake, the one that it leads to."""
    found = ways(c, mistake)
    if mistake == "never_recomputes":
        del found["recompute"]
    fits = {}
    for way, (device, host, disk, time_s) in found.items():
        room = device <= c.hbm_bytes
        room = room and (host <= c.host_bytes or mistake == "host_without_end")
        room = room and (disk <= c.disk_bytes or mistake == "disk_without_end")
        if room or mistake == "memory_forgotten":
            fits[way] = time_s
    if not fits:
        return "disk" if mistake == "never_nowhere" else NOWHERE
    if mistake == "first_that_fits" or ("device" in fits and mistake not in ("device_left", "slowest")):
        return next(iter(fits))
    return (max if mistake == "slowest" else min)(fits, key=fits.get)


def clear(c: Configuration, times: str = "") -> bool:
    """Whether no edge is near: neither in bytes nor between the two fastest ways. times: "dear_offload" for its."""
    found = ways(c, times)
    limits = [pair for device, host, disk, _ in found.values() for pair in _pairs(c, device, host, disk)]
    if any(abs(needed / limit - 1) < 1e-3 for needed, limit in limits):
        return False
    times = sorted(time_s for device, host, disk, time_s in found.values() if _fits(c, device, host, disk))
    return len(times) < 2 or times[1] > times[0] * (1 + CLEAR)


def _pairs(c: Configuration, device: float, host: float, disk: float) -> list[tuple[float, float]]:
    return [(device, c.hbm_bytes), (host, c.host_bytes), (disk, c.disk_bytes)]


def _fits(c: Configuration, device: float, host: float, disk: float) -> bool:
    return all(needed <= limit for needed, limit in _pairs(c, device, host, disk))


def _answers(fn: Callable, asked: list[Configuration]) -> Any:
    """Runs in a rank: (answers with the usual step_time, those with `dear_offload`)."""
    found = asked_of.borrowed(fn)
    if found is not None:
        return found
    answers = tuple([fn(each, step_time) for each in asked] for step_time in (stations.step_time_s, dear_offload))
    return NotImplemented if any(answer is NotImplemented for answer in answers[0]) else answers


def _told(c: Configuration) -> str:
    return (
        f"{c.name}: {c.num_parameters / 1e9:.3g}B parameters, {c.gpus} GPUs of {c.hbm_bytes / 1e9:.4g} GB, activations "
        f"{c.activation_bytes / 1e9:.3g} GB ({c.recomputed_bytes / 1e9:.3g} recomputed), host {c.host_bytes / 1e9:.4g} "
        f"GB, disk {c.disk_bytes / 1e9:.4g} GB, forward {c.forward_s:.3g} s"
    )


def _known(asked: list[Configuration], answers: list[str]) -> tuple[str, str] | None:
    if len(set(answers)) == 1:
        return "always_the_same", f"{answers[0]} is no answer for all of them."
    for cause, sentence in _SENTENCES.items():
        if all(answer == decide(each, cause) for each, answer in zip(asked, answers, strict=True)):
            return cause, sentence
    return None


def _which(answers: list[str], due: list[str]) -> tuple[str, str]:
    pairs = Counter((d, a) for a, d in zip(answers, due, strict=True) if a != d)
    told = "; ".join(f"{count} times {a} where {d} is due" for (d, a), count in pairs.most_common(3))
    return "wrong_decisions", f"{told}."


_SENTENCES = {
    "first_that_fits": "the first way that fits is taken; another that fits may be faster, recomputing is not free.",
    "device_left": "where everything fits on the device, stay there: offload could gain no more than Adam's own time.",
    "memory_forgotten": "the fastest way is taken, whether it fits or not.",
    "slowest": "the slowest way that fits is taken.",
    "never_recomputes": "recomputation is left out: it can do without any host.",
    "gradients_forgotten": "gradients, 2 bytes per parameter, lie on the device too while the state does.",
    "master_forgotten": "Adam's state is 12 bytes per parameter: master and two moments in fp32.",
    "weights_twice": "16 bytes per parameter counts the bf16 weights twice: state and gradients are 14.",
    "host_recomputes": "recomputation is a way of its own: with state on host or disk all activations are kept.",
    "host_without_gradients": "the host holds gradients too: 14 bytes per parameter, not the state's 12.",
    "all_on_disk": "on disk lies the state, 12 bytes; gradients, 2 bytes, are in the host's memory.",
    "never_nowhere": "where nothing fits the answer is nowhere.",
    "gradients_stay": "with offload gradients leave the device as they appear.",
    "no_activations": "activations take room as well.",
    "whole_state": "each GPU has 1 / gpus of state and gradients, and its Adam updates so many parameters.",
    "weights_divided": "ZeRO-2 divides state and gradients; weights are whole on every GPU.",
    "host_of_one_gpu": "host_bytes and disk_bytes are the node's: they hold what all its GPUs put there.",
    "host_without_end": "the host's memory has an end too.",
    "disk_without_end": "the disk has an end too.",
    "disk_without_host": "with state on disk the gradients, 2 bytes per parameter, still lie in the host's memory.",
    "free": "recomputation takes another forward, within backward.",
    "no_overlap": "offload is taken without overlap: with it the link works while backward does.",
    "whole_time": "each GPU's Adam, and its link, has 1 / gpus of the parameters.",
}
