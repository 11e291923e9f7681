"""Lab 04's experiments for a terminal: `labkit run lab04.stages`, `labkit run lab04.switches`.

Left out: what the learner writes; these are torch's and DeepSpeed's own.
"""

from __future__ import annotations

import labkit.labs.lab04.pictures as pictures
import labkit.labs.lab04.recorded as recorded
from labkit.labs.lab02 import asked


def stages(world_size: int = 2) -> None:
    """Record a step by DDP, FSDP2 and DeepSpeed's stages 0 to 3; print bytes kept, elements sent and calls.

    Raises ValueError for a world_size that is not 2 or more, DeepSpeedMissing, RankFailed.
    """
    import labkit.labs.lab04.engines as engines

    asked.whole("world_size", world_size, 2, least=2, most=64)
    ways = {"DDP": recorded.ddp_way, "FSDP2": recorded.fsdp_way}
    own = [recorded.record(name, way, world_size) for name, way in ways.items()]
    configs = {f"DeepSpeed, stage {stage}": engines.config(stage) for stage in range(4)}
    print(f"{own[0].parameters:,} parameters Ψ, fp32, {world_size} ranks; bytes per parameter when backward has ended")
    print(pictures.step_table([*own, *engines.record(configs, world_size).values()], world_size))


def switches(world_size: int = 2) -> None:
    """Record DeepSpeed's stage 2 with one switch turned at a time; print calls, buckets, and what a T4 would wait for.

    Raises as `stages`.
    """
    import labkit.labs.lab04.engines as engines
    from labkit.cost import hardware

    asked.whole("world_size", world_size, 2, least=2, most=8)
    found = engines.record({name: engines.config(2, **each) for name, each in engines.SWITCHES.items()}, world_size)
    print(pictures.switches_table(found, hardware.cluster("T4", per_node=world_size)))
