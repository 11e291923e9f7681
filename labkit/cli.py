"""The `labkit` command. Each subcommand imports the room behind it when called, so that help is instant.

Exit codes: 0 all is well; 1 something was found, or failed; 2 misused; 130 interrupted. An error that a user
can act on is one line on stderr; a traceback means a defect in labkit, or in the code that it ran.
Left out: what launchers do. `labkit run` is an ordinary entry point for torchrun, deepspeed or Slurm.
"""

import argparse
import ast
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys


def main(argv=None):
    """Run one subcommand and return its exit code. `argv` defaults to the command line."""
    args = _parser().parse_args(argv)
    try:
        code = args.command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `labkit ... | head`: the reader has gone; spare the interpreter its last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("labkit"):
            raise
        print(f"labkit: {error.name} is not installed; `labkit doctor` says what is missing", file=sys.stderr)
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 1


def _parser():
    parser = argparse.ArgumentParser(prog="labkit", description="Parallel Training Lab: its helper command.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print labkit's version")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)

    doctor = commands.add_parser("doctor", help="what this machine has, and what is missing costs you")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(command=_doctor)

    progress = commands.add_parser("progress", help="your points so far")
    progress.add_argument("--json", action="store_true", help="print what is stored, as JSON")
    progress.set_defaults(command=_progress)

    prove = commands.add_parser("prove", help="try a lab's checks on known wrong and right answers")
    prove.add_argument("lab", metavar="LAB", help="the lab's number, e.g. 00")
    prove.set_defaults(command=_prove)

    build = commands.add_parser("build", help="build the notebook editions from notebooks/source")
    how = build.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="write nothing; fail if an edition is out of date")
    how.add_argument("--missing", action="store_true", help="write only editions that do not exist yet")
    build.set_defaults(command=_build)

    run = commands.add_parser("run", help="run an experiment of a lab; without a name, list them")
    run.add_argument("experiment", nargs="?", metavar="LAB.NAME", help="e.g. lab00.deadlock")
    run.add_argument("values", nargs="*", metavar="NAME=VALUE", help="arguments of the experiment")
    run.set_defaults(command=_run)
    _estimate_options(commands)
    return parser


def _estimate_options(commands):
    """Defaults are those of `Layout`, except where the help says otherwise; values are checked there, too."""
    add = commands.add_parser("estimate", help="the memory a model needs to train, and whether it fits").add_argument
    add("model", nargs="?", metavar="MODEL", help="a name (--list has all), a config.json, or a folder with one")
    add("--list", action="store_true", help="list the models that have a name")
    add("--json", action="store_true", help="print the estimate as JSON")
    add("--device", default="H100", help="what it runs on, e.g. T4, A100-40, A100-80, H100 (the default)")
    for name, what in (
        ("--gpus", "devices in all (default: tp x pp x cp); dp is what the other axes leave"),
        ("--tp", "tensor parallel"),
        ("--pp", "pipeline parallel"),
        ("--cp", "context parallel"),
        ("--ep", "expert parallel, within dp x cp"),
        ("--zero", "ZeRO stage, 0 to 3"),
        ("--shard-within", "ranks that ZeRO divides over, copies beyond (HSDP; default: all)"),
        ("--per-node", "ranks of dp x cp in a node, for ZeRO++ (default: its GPUs / tp)"),
        ("--micro-batch", "sequences at once"),
        ("--microbatches", "microbatches a step and rank (default: pp)"),
        ("--interleave", "chunks of layers per pipeline rank"),
        ("--seq", "tokens of a sequence (default: 4096, or the model's positions)"),
        ("--bucket", "elements of DeepSpeed's reduce_bucket_size"),
    ):
        add(name, type=int, metavar="N", help=what)
    add("--recompute", metavar="WHAT", help="none, selective or full")
    add("--precision", metavar="WHAT", help="bf16, fp16 or fp32")
    add("--offload", metavar="WHAT", help="none, optimizer, parameters or nvme")
    add("--zeropp", metavar="WHAT", help="of ZeRO++ qwz, hpz and qgz, joined by +; all or none")
    add("--convention", metavar="WHAT", help="bytes of states as zero, megatron or deepspeed count them")
    add("--activations", metavar="WHAT", help="megatron (the papers' formulas) or eager (what torch saves)")
    add("--program", metavar="NAME", help="common, nanotron, torchtitan, torchtune, fsdp_lora or fsdp_qlora")
    add("--flash", action=argparse.BooleanOptionalAction, help="attention that keeps no scores (default: yes)")
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, help="with tp (default: yes)")
    commands.choices["estimate"].set_defaults(command=_estimate)


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        import labkit

        print(f"labkit {labkit.__version__}")
        parser.exit()


def _doctor(args):
    from labkit.doctor import environment

    report = environment.examine()
    print(report.json() if args.json else report.text())
    return 1 if report.problems else 0


def _progress(args):
    from labkit.check import progress

    return progress.main(as_json=args.json)


def _prove(args):
    from labkit.classroom import prove

    return prove.main(args.lab)


def _build(args):
    from labkit.classroom import build

    return build.main(check=args.check, missing=args.missing)


def _estimate(args):
    from labkit.cost import request

    return request.main(vars(args))


def _run(args):
    if args.experiment is None:
        for name, line in listing():
            print(f"{name:24} {line}")
        return 0
    result = find(args.experiment)(**keywords(args.values))
    if result is not None:
        print(result)
    return 0


def listing():
    """Every experiment as (name, first line of its docstring), by lab and then in the order of the source."""
    from labkit import labs

    found = sorted(m.name for m in pkgutil.iter_modules(labs.__path__) if re.fullmatch(r"lab\d\d", m.name))
    return [
        (f"{lab}.{name}", inspect.getdoc(fn).splitlines()[0])
        for lab in found
        for name, fn in experiments(importlib.import_module(f"labkit.labs.{lab}")).items()
    ]


def experiments(lab):
    """The experiments of a lab's module, by name: its own documented functions that need no argument."""
    return {name: fn for name, fn in vars(lab).items() if name[0] != "_" and _startable(fn, lab.__name__)}


def _startable(fn, module):
    if not (inspect.isfunction(fn) and fn.__doc__ and f"{fn.__module__}.".startswith(f"{module}.")):
        return False
    try:
        inspect.signature(fn).bind()
    except TypeError:
        return False
    return True


def find(name):
    """The experiment called `name`, e.g. "lab00.deadlock". Raises ValueError, saying what there is."""
    lab, _, function = name.partition(".")
    module = f"labkit.labs.{lab}"
    if not re.fullmatch(r"lab\d\d", lab) or importlib.util.find_spec(module) is None:
        raise ValueError(f"there is no lab {lab!r}; `labkit run` lists the experiments")
    found = experiments(importlib.import_module(module))
    if function not in found:
        raise ValueError(f"{lab} has no experiment {function!r}; it has {', '.join(found) or 'none'}")
    return found[function]


def keywords(words):
    """Arguments from words like `world_size=3` or `text=hello`: Python literals where they are, else strings.

    Raises ValueError for a word of another form.
    """
    values = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (equals and name.isidentifier()):
            raise ValueError(f"{word!r} is not of the form NAME=VALUE")
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
    return values


if __name__ == "__main__":
    sys.exit(main())
