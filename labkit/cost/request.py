"""`labkit estimate`: options to a layout, a layout to what is printed."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from labkit.cost import changes, report, shapes
from labkit.cost.config import model
from labkit.cost.estimate import as_json, estimate
from labkit.cost.layout import Layout, check, check_experts, data_parallel
from labkit.cost.named import models
from labkit.cost.shapes import Shape

SEQ = 4096


def main(given: dict[str, Any]) -> int:
    """Print an estimate; 0 when it fits, 1 when it does not. `given` has the command's options by name.

    ValueError, one line, for what cannot be.
    """
    if given.get("list"):
        print("\n".join(f"{shape.name:20}{shapes.parameters(shape):>18,}" for shape in models()))
        return 0
    if not given.get("model"):
        raise ValueError("name a model, like `labkit estimate llama-3.1-8b`, or give a config.json; --list has all")
    shape = model(given["model"])
    result = estimate(shape, layout_of(shape, given), given.get("device") or "H100")
    cheaper = changes.cheapest(result)
    if given.get("json"):
        found = [
            {
                "options": c.options,
                "total": c.result.memory.total,
                "needed": c.result.needed_bytes,
                "slowdown": c.slowdown,
            }
            for c in cheaper
        ]
        print(json.dumps(as_json(result) | {"changes": found}, indent=2))
    else:
        print(report.text(result, cheaper))
    return 0 if result.fits else 1


def layout_of(shape: Shape, given: dict[str, Any]) -> Layout:
    """The layout that the options ask for; None, or no key at all, is the default. ValueError as `Layout`."""
    known = {field.name for field in fields(Layout)}
    chosen = {key: value for key, value in given.items() if key in known and value is not None}
    axes = [chosen.get(axis, 1) for axis in ("tp", "pp", "cp")]
    chosen.setdefault("microbatches", axes[1])
    chosen.setdefault("seq", min(SEQ, shape.positions or SEQ))
    later = {key: chosen.pop(key) for key in ("ep", "shard_within", "zeropp", "per_node") if key in chosen}
    one = Layout(**chosen)
    check(shape, one)  # before numbers of GPUs are proposed that such axes could use
    gpus = given.get("gpus")
    one = replace(one, dp=one.dp if gpus is None else data_parallel(gpus, *axes))
    check_experts(shape, one, later.get("ep", 1))
    return replace(one, **later)
