"""`make bench`: every figure in turn. Run it on a quiet machine; the ratios bear more than the seconds."""

import importlib
import pkgutil
import sys

import tests.bench


def main(wanted: list[str]) -> None:
    """Run the benches named (all of them by default), each a module here with a `main`."""
    names = sorted(module.name for module in pkgutil.iter_modules(tests.bench.__path__))
    for name in wanted or [n for n in names if not n.startswith("_")]:
        print(f"== {name}", flush=True)
        importlib.import_module(f"tests.bench.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
