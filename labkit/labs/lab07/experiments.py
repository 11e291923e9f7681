"""Lab 07's experiments for a terminal: schedules measured beside theory, and pipelines of torch and of DeepSpeed.

Left out: what the learner writes; schedules are run by labkit's executor, the rest are torch's and DeepSpeed's own.
"""

from __future__ import annotations

from labkit.check.table import table
from labkit.cost.cores import usable_cores
from labkit.labs.lab02 import asked


def schedules(ranks: int = 4, microbatches: int = 8) -> None:
    """Run five schedules on CPUs; print how long ranks idle by theory, replayed, by the clock, and what rank 0 keeps.

    Raises ValueError for ranks that are not 2 to 16, and for microbatches that are no multiple of them; RankFailed.
    """
    import labkit.labs.lab07.measured as measured

    asked.whole("ranks", ranks, 4, least=2, most=16)
    _multiple(ranks, microbatches)
    rows = [
        (each.name, f"{each.theory:.1%}", f"{each.replayed:.1%}", f"{each.clock:.1%}", f"{each.kept_bytes / 1e6:.2f}")
        for each in measured.measured(ranks, microbatches)
    ]
    print(f"{ranks} ranks, {microbatches} microbatches, equal stages on CPUs; share of all time in which ranks idle")
    print(table(("", "theory", "replayed", "clock", "rank 0 keeps, MB"), rows))
    if (cores := usable_cores()) < ranks:
        print(f"There are {cores:g} cores, so the {ranks} ranks take turns, which theory and replay leave out.")


def pipelining(ranks: int = 4, microbatches: int = 8, steps: int = 3) -> None:
    """Train a small Llama by torch.distributed.pipelining; print losses, and how far they are from a serial run's.

    Raises ValueError for ranks that are not 2 to 4, fewer microbatches than ranks, and steps below 1; RankFailed.
    """
    import labkit.labs.lab07.engines as engines

    _sizes(ranks, microbatches, steps)
    names = ("ScheduleGPipe", "Schedule1F1B")
    _print_trained({name: engines.by_torch(name, ranks, microbatches, steps) for name in names}, microbatches, steps)


def pipeline_module(ranks: int = 4, microbatches: int = 8, steps: int = 3) -> None:
    """Train the same Llama by DeepSpeed's PipelineModule; print its losses, and what it says to ZeRO stages 1 to 3.

    Raises ValueError as `pipelining`; DeepSpeedMissing, RankFailed.
    """
    import labkit.labs.lab07.engines as engines

    _sizes(ranks, microbatches, steps)
    _print_trained({"PipelineModule": engines.by_deepspeed(ranks, microbatches, steps)}, microbatches, steps)
    for stage in (1, 2, 3):
        print(f"with ZeRO stage {stage}: {engines.refusal(stage) or 'taken'}")


def _multiple(ranks: int, microbatches: int) -> None:
    """Raises ValueError for another number of microbatches than interleaved can take."""
    asked.whole("microbatches", microbatches, 2 * ranks)
    if microbatches % ranks:
        due = -(-microbatches // ranks) * ranks
        said = f"interleaved takes microbatches in groups of {ranks}, and {microbatches} is no multiple"
        raise ValueError(f"{said}; microbatches={due} would do")


def _sizes(ranks: int, microbatches: int, steps: int) -> None:
    """The model has four layers, and a stage one or more."""
    asked.whole("ranks", ranks, 4, least=2, most=4)
    asked.whole("microbatches", microbatches, 8, least=ranks)
    asked.whole("steps", steps, 3)


def _print_trained(trained: dict, microbatches: int, steps: int) -> None:
    import labkit.labs.lab07.engines as engines

    due, rows = engines.serial(microbatches, steps), []
    for name, each in (("serial", due), *trained.items()):
        off = max(abs(a - b) for a, b in zip(each.losses, due.losses, strict=True))
        kept = ", ".join(f"{count:,}" for count in each.kept)
        rows.append((name, f"{each.losses[0]:.4f}", f"{each.losses[-1]:.4f}", f"{off:.0e}", kept))
    print(table(("", "first loss", "last", "off serial by", "parameters of each rank"), rows))
