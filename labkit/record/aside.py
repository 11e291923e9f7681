"""Where DTensor tries an op on tensors without memory, only to learn its result's shape: nothing that happens.

Without fakes of one's own such an op is known by its FakeTensors. Where a whole model is fake (`Trace(fake=True)`),
DTensor tries in the same FakeTensorMode, with tensors of the global shape; then its propagator is wrapped. Left out:
torch.compile's tracing.
"""

from __future__ import annotations

from labkit.record.waits import Patches


def fake_mode() -> object | None:
    """The FakeTensorMode that is on, if one is."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return next((mode for mode in _get_current_dispatch_mode_stack() if type(mode).__name__ == "FakeTensorMode"), None)


class Aside:
    """depth: more than 0 while DTensor tries an op."""

    def __init__(self):
        self.depth = 0
        self.patches = Patches()

    def watch(self) -> None:
        """Wrap DTensor's propagator; also load what torch has to run collectives without memory."""
        import torch.distributed as dist

        if not dist.is_available():
            return
        import torch.distributed._tools.fake_collectives  # noqa: F401  gives collectives a meta kernel
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        name = "_propagate_tensor_meta_non_cached"
        original = ShardingPropagator.__dict__[name]

        def tried(propagator, op_schema):
            self.depth += 1
            try:
                return original(propagator, op_schema)
            finally:
                self.depth -= 1

        self.patches.put(ShardingPropagator, name, tried)

    def close(self) -> None:
        self.patches.undo()
