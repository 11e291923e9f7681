"""What a verdict rests on is compared with what is installed:

any replaced entry is named, and nothing else is.
"""

import builtins
import functools
import importlib
import pickle
import pkgutil
import types
from dataclasses import replace

import pytest
import torch

import labkit
from labkit.check import compare, evidence, exercise, honesty, pristine, progress, twins
from labkit.check.exercise import right
from labkit.ranks import launch, places, verdict
from labkit.record import integrity, trace


def test_untouched_code_is_pristine():
    for name in ("labkit.labs.lab00", "labkit.check.check", "labkit.check.rerun", "labkit.check.table"):
        importlib.import_module(name)
    pickle.dumps(exercise.right())  # pickling leaves a mark on the class
    assert pristine.first_patched() == ""


@pytest.mark.parametrize(
    ("holder", "name", "told"),
    [
        (torch, "allclose", "torch.allclose"),
        (torch.Tensor, "numpy", "torch.Tensor.numpy"),
        (pickle, "loads", "pickle.loads"),
        (compare, "difference", "labkit.check.compare.difference"),
        (evidence, "honest", "labkit.check.evidence.honest"),
        (trace.Trace, "__exit__", "labkit.record.trace.Trace.__exit__"),
        (trace, "Trace", ".Trace"),  # in the first module that has imported it
        (integrity.Integrity, "clean", "labkit.record.integrity.Integrity.clean"),
        (launch, "run_ranks", "labkit.ranks.launch.run_ranks"),
        (verdict, "definite", "labkit.ranks.verdict.definite"),
        (progress, "judged", "labkit.check.progress.judged"),
        (labkit, "launch", "labkit.launch"),
    ],
)
def test_a_replaced_entry_is_named(monkeypatch, holder, name, told):
    monkeypatch.setattr(holder, name, lambda *args, **kwargs: None)
    assert pristine.first_patched() == told or told[0] == "." and pristine.first_patched().endswith(told)


def test_a_wrapper_that_claims_to_wrap_the_original_is_found(monkeypatch):
    original = compare.difference
    monkeypatch.setattr(compare, "difference", functools.wraps(original)(lambda *a, **k: None))
    assert pristine.first_patched() == "labkit.check.compare.difference"


def test_code_swapped_within_a_function_is_found(monkeypatch):
    def nothing(got, expected, rtol=0.0, atol=0.0, where=""):
        return None

    monkeypatch.setattr(compare.difference, "__code__", nothing.__code__)
    assert pristine.first_patched() == "labkit.check.compare.difference"


def test_an_imported_name_that_is_not_what_its_home_has_is_found(monkeypatch):
    twin = types.FunctionType(evidence.wrong.__code__, evidence.wrong.__globals__, "wrong")
    monkeypatch.setattr(evidence, "wrong", twin)
    assert pristine.first_patched() == "labkit.check.evidence.wrong"


def test_another_c_function_under_the_name_is_found(monkeypatch):
    monkeypatch.setattr(torch, "allclose", torch.is_tensor if callable(torch.is_tensor) else None)
    assert pristine.first_patched() == "torch.allclose"
    monkeypatch.setattr(torch, "allclose", torch.add)
    assert pristine.first_patched() == "torch.allclose"


def test_a_lab_whose_exercises_have_another_judge_is_found(monkeypatch):
    from labkit.labs import lab00

    easy = replace(lab00.EXERCISES[0], judge=lambda fn, seed: right())
    monkeypatch.setattr(lab00, "EXERCISES", (easy, *lab00.EXERCISES[1:]))
    assert pristine.first_patched() == "labkit.labs.lab00.EXERCISES"


def test_judges_that_changed_places_are_found(monkeypatch):
    from labkit.labs import lab00

    first, second, *others = lab00.EXERCISES
    monkeypatch.setattr(lab00, "EXERCISES", (first, replace(second, judge=first.judge), *others))
    assert pristine.first_patched() == "labkit.labs.lab00.EXERCISES"


class Lenient(int):
    """An int that equals everything."""

    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        (exercise.Verdict, "passed", property(lambda self: True)),
        (exercise.Verdict, "__init__", lambda self, *args, **kwargs: None),
        (exercise.Verdict, "__eq__", lambda self, other: True),
        (exercise.Verdict, "__getattribute__", lambda self, name: True),
        (honesty, "SOCKET_TOLERANCE", 1e9),
        (honesty, "HEADER_BYTES", Lenient(honesty.HEADER_BYTES)),
        (honesty, "P2P", ["send", "recv"]),
        (evidence, "enumerate", lambda items: ()),
        (evidence, "len", lambda items: 0),
        (compare, "__builtins__", {}),
        (compare.difference, "__defaults__", (1e9, 1e9, "")),
        (places, "is_readers", functools.lru_cache(maxsize=4096)(lambda filename: False)),
    ],
)
def test_what_the_source_does_not_bind_so_is_found(monkeypatch, holder, name, value):
    if name == "is_readers":
        value.__wrapped__ = places.is_readers.__wrapped__
    monkeypatch.setattr(holder, name, value, raising=False)
    told = pristine.first_patched()
    if isinstance(holder, types.FunctionType):
        assert told == "labkit.check.compare.difference"
    elif holder is places:  # whoever imported it has the genuine one, so differs from its home
        assert told.endswith(".is_readers")
    else:
        home = f"{holder.__module__}.{holder.__name__}" if isinstance(holder, type) else holder.__name__
        assert told == f"{home}.{name}"


def test_a_replaced_builtin_is_named(monkeypatch):
    for name, value in (("enumerate", lambda items: iter(())), ("zip", map), ("len", id)):
        with monkeypatch.context() as patch:
            patch.setattr(builtins, name, value)
            told = pristine.first_patched()
        assert told == f"builtins.{name}"


def test_every_module_of_labkit_has_a_twin_that_is_the_same():
    for room in pristine.ROOMS:
        package = importlib.import_module(room)
        for found in pkgutil.walk_packages(package.__path__, f"{room}."):
            assert list(pristine.patched_in(importlib.import_module(found.name))) == []


def test_an_autograd_function_has_a_twin_and_a_changed_one_has_not(monkeypatch):
    module = types.ModuleType("labkit.made_up")
    module.__file__ = "made_up.py"
    source = b"""
import torch

class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient
"""
    exec(compile(source, module.__file__, "exec"), vars(module))
    twin = twins.of(module, source)

    def difference():
        return twins.Same(vars(module), twin).difference(module.Identity, twin["Identity"], "Identity")

    assert difference() == ""
    monkeypatch.setattr(module.Identity, "_backward_cls", torch.autograd.function.Function)
    assert difference() == "Identity._backward_cls"
    monkeypatch.undo()
    monkeypatch.setattr(module.Identity, "backward", staticmethod(lambda ctx, gradient: 2 * gradient))
    assert difference() == "Identity.backward"


def test_constants_are_compared_by_type_and_value():
    def code(source):
        return compile(source, "f", "exec")

    assert twins.same_code(code("x = 1"), code("x = 1"))
    for one, other in (("x = 1", "x = True"), ("x = 1", "x = 2"), ("x = 1", "y = 1"), ("x = -0.0", "x = 0.0"),
                       ("def f(): return 1", "def f(): return 2"), ("x in {1, 2}", "x in {1, 3}")):  # fmt: skip
        assert not twins.same_code(code(one), code(other)), one
