"""Whether torch's DTensor did what was to be written by hand. Asked in a rank, about one answer's calls.

A DTensor lives no longer than a call, so its makers and its ways back are watched meanwhile; where the module is not
loaded yet, that it gets loaded tells enough. Left out: other ready-made classes, which hold on to what they wrap.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from labkit.labs.lab00.attempts import Unusable

_ROOM = "torch.distributed.tensor"


@contextmanager
def watched() -> Iterator[Callable[[], Unusable | None]]:
    """Gives a function: what to say where the block made a DTensor, else None."""
    from labkit.record.waits import Patches

    loaded, used, patches = _ROOM in sys.modules, [], Patches()
    if loaded:
        import torch.distributed.tensor as room

        patches.put(room.DTensor, "from_local", staticmethod(_noting(room.DTensor.from_local, used)))
        patches.put(room, "distribute_tensor", _noting(room.distribute_tensor, used))
        for name in ("to_local", "full_tensor"):  # a maker that the answer bound when it was imported ends here
            patches.put(room.DTensor, name, _noting(getattr(room.DTensor, name), used))

    def told() -> Unusable | None:
        if not used and (loaded or _ROOM not in sys.modules):
            return None
        return Unusable("ready_made", "torch's DTensor does the work here; write it yourself, from collectives.")

    try:
        yield told
    finally:
        patches.undo()


def _noting(original: Callable, used: list[bool]) -> Callable:
    def noted(*args: Any, **kwargs: Any) -> Any:
        used.append(True)
        return original(*args, **kwargs)

    return noted
