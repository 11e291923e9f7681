"""What crossed the wire in exercise 5.1, when, and what lay on the device: by its book.

Left out: whether the weights are right (`offloaded`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.check.exercise import Verdict, wrong

EARLY = 0.4  # of the bytes must have moved while backward still computes; the first layer's come too late for that


@dataclass(frozen=True)
class Moved:
    """One step's bytes. down, up: all of them; early_*: before backward's last product. stray: gradients of other
    parameters that were there when one more appeared, at most. ended, zeroed: held after backward and after the step.
    late: both ways after backward.
    """

    down: int
    up: int
    early_down: int
    early_up: int
    stray: int
    ended: int
    zeroed: int
    late: int


def moved(case: Any, result: dict[str, Any], serial: Any) -> tuple[Verdict | None, str]:
    """(what is wrong or None, figures for a pass; "" for a case that is too small to look at)."""
    parameters = sum(each.nbytes for each in serial.start.values())
    begin, per_step = steps_of(result["entries"])
    if len(per_step) != len(case.batches):
        sentence = "the device's book does not show the steps that it was led through."
        return wrong("evidence", "no_record", sentence, case.tried, f"{len(per_step)} steps"), ""
    sizes = {name: serial.start[name].nbytes for name in serial.grads}
    for step, seen in enumerate(per_step):
        due = sum(sizes[name] for name, grads in serial.grads.items() if grads[step] is not None)
        slack = 64 * len(sizes) + 256
        found = _held(case, seen, begin, parameters, due, slack)
        found = found or _bytes(case, seen, due, slack, sum(each.numel() for each in serial.start.values()))
        if found is None and case.what in ("plain", "bf16"):
            found = _when(case, seen, due) or _left(case, seen, parameters, max(sizes.values()), slack)
        if found is not None:
            return found, ""
    found = _host(case, result["host"], serial)
    last = per_step[-1]
    figures = (
        f"{last.down} bytes of gradients go to the host in a step and {last.up} of weights come back, "
        f"{last.early_up / max(1, last.up):.0%} of them while backward computes; between steps the device holds "
        f"{last.zeroed} bytes, the weights alone"
    )
    return found, figures if case.what == "bf16" else ""


def steps_of(entries: list[tuple]) -> tuple[int, list[Moved]]:
    """(bytes held when the optimizer had been made, what moved in each step) of a book's entries."""
    marks = [(i, name, held) for i, (kind, name, _, _, held, _) in enumerate(entries) if kind == "mark"]
    at = {word: [i for i, name, _ in marks if name == word] for word in ("backward", "ended", "zeroed")}
    begin = next((held for _, name, held in marks if name == "begin"), 0)
    found = []
    for backward, ended, zeroed in zip(at["backward"], at["ended"], at["zeroed"], strict=False):
        products = [i for i in range(backward, ended) if entries[i][0] == "op" and entries[i][3] > 0]
        last = products[-1] if products else ended
        stray = [int(name.rsplit(" ", 1)[1]) for i, name, _ in marks if backward < i < ended and "gradient" in name]
        found.append(
            Moved(
                *(_sum(entries, kind, backward, zeroed) for kind in ("down", "up")),
                *(_sum(entries, kind, backward, last) for kind in ("down", "up")),
                max(stray, default=0),
                entries[ended][4],
                entries[zeroed][4],
                sum(_sum(entries, kind, ended, zeroed) for kind in ("down", "up")),
            )
        )
    return begin, found


def _sum(entries: list[tuple], kind: str, first: int, last: int) -> int:
    return sum(num_bytes for each, _, num_bytes, *_ in entries[first:last] if each == kind)


def _held(case: Any, seen: Moved, begin: int, parameters: int, due: int, slack: int) -> Verdict | None:
    """Between steps the device holds the model and nothing else."""
    extra = seen.zeroed - parameters
    if extra <= slack:
        return None
    cause, sentence = "state_on_device", "state lies on the device between steps: make it on the host."
    if begin - parameters <= slack and abs(extra - due) <= slack:
        cause, sentence = "gradients_held", "gradients are still on the device after zero_grad(): let go of them."
    got, expected = f"{seen.zeroed} bytes on the device between steps", f"{parameters}, the model alone"
    return wrong("evidence", cause, sentence, case.tried, got, expected)


def _bytes(case: Any, seen: Moved, due: int, slack: int, elements: int) -> Verdict | None:
    """Each gradient crosses once, as it is, and so does each new weight."""
    got, expected = f"{seen.down} bytes down, {seen.up} up in a step", f"{due} down and {due} up"
    if seen.down < due - slack or seen.up < due - slack:
        sentence = "the weights are right, but gradients and weights have more bytes than crossed: use to(), copy_()."
        return wrong("evidence", "no_copies", sentence, case.tried, got, expected)
    if seen.up > due + slack and seen.down > due + slack and seen.up + seen.down >= 2 * due + 8 * elements:
        sentence = "the state itself travels: it goes to the device for the update, and back. Update on the host."
        return wrong("evidence", "state_travels", sentence, case.tried, got, expected)
    if seen.down > due + slack:
        cause, sentence = "down_more", "more than the gradients goes to the host in a step."
        if abs(seen.down - 2 * due) <= slack:
            cause, sentence = "down_wide", "gradients travel twice as wide as they are: `.to(host, torch.float32)` "
            sentence += "converts before it copies. Copy first, then convert."
            if case.plan.dtype == "float32":
                cause, sentence = "down_twice", "every gradient, or its weight, goes to the host twice in a step."
        return wrong("evidence", cause, sentence, case.tried, got, expected)
    if seen.up > due + slack:
        cause, sentence = "up_more", "more than the new weights goes to the device in a step."
        if abs(seen.up - 2 * due) <= slack:
            cause, sentence = "up_wide", "weights travel in fp32: convert them to the model's dtype on the host."
            if case.plan.dtype == "float32":
                cause, sentence = "up_twice", "every weight goes to the device twice in a step."
        return wrong("evidence", cause, sentence, case.tried, got, expected)
    return None


def _when(case: Any, seen: Moved, due: int) -> Verdict | None:
    expected = f"at least {EARLY:.0%} of the bytes"
    if seen.early_down < EARLY * due:
        sentence = "gradients go to the host only when backward is over: take each as it appears, in a hook."
        got = f"{seen.early_down / due:.0%} of the gradients' bytes while backward computes"
        return wrong("evidence", "after_backward", sentence, case.tried, got, expected)
    if seen.early_up < EARLY * due:
        sentence = "gradients go to the host during backward, but the update waits for its end: update at once."
        got = f"{seen.early_up / due:.0%} of the weights' bytes while backward computes"
        return wrong("evidence", "update_after_backward", sentence, case.tried, got, expected)
    if seen.late:
        sentence = "some updates are left for step(): it should find all done. Update each parameter in its own hook."
        got = f"{seen.late} bytes copied after backward"
        return wrong("evidence", "left_for_step", sentence, case.tried, got, "0: nothing is left to copy")
    return None


def _left(case: Any, seen: Moved, parameters: int, largest: int, slack: int) -> Verdict | None:
    """A gradient that has been copied is let go of."""
    sentence = "gradients stay on the device when they have been copied: set `.grad` to None in the hook."
    if seen.stray > 1:
        got = f"{seen.stray} other gradients on the device as one more appears"
        return wrong("evidence", "gradients_kept", sentence, case.tried, got, "at most 1")
    room = largest + slack + 4096
    if seen.ended > parameters + room:
        got = f"{seen.ended - parameters} bytes beside the weights as backward ends"
        return wrong("evidence", "gradients_kept", sentence, case.tried, got, f"at most {room}, one gradient")
    return None


def _host(case: Any, host: dict[str, int], serial: Any) -> Verdict | None:
    """Two moments in fp32 for all that was ever updated, and a master where the model's dtype is narrower."""
    used = [name for name, grads in serial.grads.items() if any(grad is not None for grad in grads)]
    elements = sum(serial.start[name].numel() for name in used)
    each = 3 if case.plan.dtype == "bfloat16" else 2
    wide = host.get("float32", 0) + host.get("float64", 0)
    if wide >= each * elements:
        return None
    narrow = ", ".join(f"{count} {dtype}" for dtype, count in host.items() if dtype != "float32") or "nothing else"
    cause, sentence = "state_narrow", "the state is kept in fewer bits than fp32: moments and master are float32."
    if sum(host.values()) < each * elements:
        cause, sentence = "state_hidden", "the host's tensors are too few for the state: where is it?"
    got = f"{wide} fp32 numbers on the host, and {narrow}"
    return wrong("evidence", cause, sentence, case.tried, got, f"{each} x {elements}: {each * elements}")
