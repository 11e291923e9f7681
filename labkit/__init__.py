"""labkit: the small helper package of the Parallel Training Lab.

Here is the face: the names a notebook needs, each imported from its room when it is first used (PEP 562), so
that `import labkit` is quick and imports no torch. The lesson itself stays in the notebook, in real
`torch.distributed`; nothing here wraps it.
"""

import importlib
import sys
import types

__version__ = "0.1.0"

__all__ = [
    "CheckFailed",
    "RankFailed",
    "Trace",
    "about",
    "check",
    "device",
    "launch",
    "predict",
    "report",
    "run_ranks",
]

_HOME = {
    "CheckFailed": "labkit.check.check",
    "RankFailed": "labkit.ranks.outcome",
    "Trace": "labkit.record.trace",
    "about": "labkit.doctor.environment",
    "check": "labkit.check.check",
    "device": "labkit.ranks.rank",
    "launch": "labkit.ranks.launch",
    "predict": "labkit.check.predict",
    "report": "labkit.ranks.rank",
    "run_ranks": "labkit.ranks.launch",
}


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})


class _Face(types.ModuleType):
    """Keeps `labkit.check` the function, though the room `labkit/check/` has the same name.

    The import system hangs a room on its package as soon as anything in it is imported; without this, what
    `from labkit import check` gives would depend on what was imported before. The room is reached as ever by
    `from labkit.check import progress`.
    """

    @property
    def check(self):
        return __getattr__("check")

    @check.setter
    def check(self, value):
        if not isinstance(value, types.ModuleType):
            raise AttributeError("labkit.check cannot be replaced")

    def __reduce__(self):
        # Pickled by name, as cloudpickle does with plain modules: a rank's function may well name `labkit`.
        return importlib.import_module, (__name__,)


sys.modules[__name__].__class__ = _Face
