"""Lab 06's experiments for a terminal: torch's `parallelize_module`, DeepSpeed's AutoTP, dropout, shares by wire.

Left out: what the learner writes; these are torch's and DeepSpeed's own.
"""

from __future__ import annotations

from labkit.check.table import table


def parallelize(tp: int = 2) -> None:
    """Record torch's `parallelize_module` with and without PrepareModuleInput; print all_reduces of a layer.

    Raises ValueError for a tp that torch cannot cut the model by, RankFailed.
    """
    import labkit.labs.lab06.torchs as torchs
    import labkit.labs.lab06.training as training

    plain, rows = training.serial(3), []
    for name, with_input in (("without PrepareModuleInput", False), ("with it", True)):
        found = torchs.torchs(tp, with_input, 3)
        calls, off = torchs.layer_calls(found), training.differences(found, plain)
        rows.append((name, *map(str, calls.values()), f"{off['weights']:.1e}"))
    print(table(("parallelize_module", "forward", "backward", "weights off serial by"), rows))


def autotp(tp: int = 2) -> None:
    """Record DeepSpeed's AutoTP on a Llama from transformers; print what it cut and the calls of a layer.

    Raises ValueError for a tp other than 2, DeepSpeedMissing, RankFailed.
    """
    import labkit.labs.lab06.engines as engines

    print(engines.told(engines.autotp(tp)))


def dropout_seeds(tp: int = 2) -> None:
    """Drop out inside and after a parallel region with every choice of seeds; print how alike masks and outputs are.

    Raises ValueError for a tp that does not divide the region, RankFailed.
    """
    import labkit.labs.lab06.dropout as dropout

    rows = []
    for inside, outside in ((True, False), (False, False), (True, True), (False, True)):
        found = dropout.masks(inside, outside, tp)
        seeds = ("own" if inside else "one for all", "own" if outside else "one for all")
        rows.append((*seeds, f"{found.alike:.1%}", f"{found.apart:.2f}"))
    print(table(("seed inside", "seed outside", "masks alike inside", "ranks' outputs apart"), rows))


def wires() -> None:
    """Replay one recorded layer on 2 to 16 H100s; print the share of a step spent communicating, by wire."""
    import labkit.labs.lab06.shares as shares

    found = shares.shares()
    rows = [(wire, *(f"{each:.0%}" for each in of_degrees)) for wire, of_degrees in found.items()]
    print(table(("wire", *(f"tp {degree}" for degree in shares.DEGREES)), rows))
