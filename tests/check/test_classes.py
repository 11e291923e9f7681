"""Classes as answers: found by name, told from stubs, sealed, sent to ranks, kept as source, judged in a notebook."""

import sys
import threading

import cloudpickle
import nbclient
import nbformat
import pytest
import torch

from labkit.check import card, find, progress, sealed, stubs
from labkit.check.check import CheckFailed, check, judged, mine_or
from labkit.check.exercise import Exercise, right, wrong
from labkit.check.observed import observe


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module", autouse=True)
def by_value():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Untouched(torch.nn.Module):
    """As a learner edition has it."""

    def __init__(self, module, bucket_bytes):
        """Docstrings and comments may be changed."""
        super().__init__()
        raise NotImplementedError("Untouched is still a stub")  # your code here

    def forward(self, *args):
        return NotImplemented  # your code here

    @staticmethod
    def helper():
        return NotImplemented

    @torch.no_grad()
    def step(self):
        return NotImplemented

    @property
    def size(self):
        return NotImplemented


class Partly(Untouched):
    def __init__(self, module, bucket_bytes):
        torch.nn.Module.__init__(self)
        self.module = module

    def finish(self):
        return NotImplemented


class Doubler(torch.nn.Module):
    """Its `super()` needs the class itself when it is opened in a rank."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def exercise(judge, name="Doubler"):
    return Exercise("2.2", name, "Double", 5, 2, judge)


def doubled(cls):
    return cls(2)(torch.ones(3))


def judge_on_ranks(cls, seed):
    seen = observe(doubled, 2, args=(cls,))
    good = all(torch.equal(result, torch.full((3,), 2.0)) for result in seen.results)
    return right() if good else wrong("values", "x", "y")


def test_a_class_is_a_stub_while_all_its_methods_are():
    assert sealed.is_stub(Untouched)
    assert stubs.stub_methods(Untouched) == ["__init__", "forward", "helper", "step", "size"]
    assert not sealed.is_stub(Partly) and stubs.stub_methods(Partly) == ["finish"]
    assert not sealed.is_stub(Doubler) and stubs.stub_methods(Doubler) == []


def test_an_init_may_refuse_without_calling_super():
    class Short:
        def __init__(self):
            raise NotImplementedError("Short is still a stub")

    assert sealed.is_stub(Short)


def test_an_ordinary_not_implemented_error_is_no_stub():
    class Abstract:
        def __init__(self):
            raise NotImplementedError

    class OtherWords:
        def __init__(self):
            raise NotImplementedError("OtherWords knows no buckets of this size")

    class OtherName:
        def __init__(self):
            raise NotImplementedError("Abstract is still a stub")

    class Later:
        def __init__(self, size):
            if size < 0:
                raise NotImplementedError("Later is still a stub")

    class InAnotherMethod:
        def finish(self):
            raise NotImplementedError("InAnotherMethod is still a stub")

    class Empty:
        pass

    def function():
        raise NotImplementedError("function is still a stub")

    answers = Abstract, OtherWords, OtherName, Later, InAnotherMethod, Empty, function, int, torch.nn.Linear
    assert not any(map(sealed.is_stub, answers))


def test_an_untouched_class_is_not_attempted_and_a_partly_written_one_is_judged():
    called = []
    asked = exercise(lambda cls, seed: called.append(cls) or wrong("values", "x", "y"))
    assert judged(asked, Untouched).cause == "not_attempted" and called == []
    assert judged(asked, Partly).cause == "x" and len(called) == 1


def test_later_cells_take_the_reference_while_a_class_is_a_stub():
    assert mine_or(Untouched, Doubler) == (Doubler, "not yet yours")
    assert mine_or(Partly, Doubler) == (Partly, "yours, not passed yet")


def test_a_missing_class_and_another_value_are_told_as_such():
    asked = exercise(judge_on_ranks)
    assert "there is no class Doubler yet" in judged(asked, None).sentence
    verdict = judged(asked, 3)
    assert verdict.cause == "not_a_function" and "not a class" in verdict.sentence


def test_a_class_travels_to_ranks_by_value():
    assert find.function("Doubler") is Doubler
    assert judged(exercise(judge_on_ranks), Doubler).passed
    assert b"Doubler" in sealed.seal(Doubler).payload and sealed.seal(Doubler).__name__ == "Doubler"


def test_what_a_class_cannot_take_along_is_named():
    lock = threading.Lock()

    class Locked:
        def finish(self):
            return lock

    verdict = judged(exercise(judge_on_ranks), Locked)
    assert verdict.cause == "unpicklable_function" and "`lock`" in verdict.sentence and "`Locked`" in verdict.sentence


def test_the_source_of_a_class_is_kept():
    assert sealed.source_of(Partly).startswith("class Partly(Untouched):")
    assert sealed.source_of(Partly).rstrip().endswith("return NotImplemented")
    with pytest.raises(CheckFailed, match="not_attempted|still a stub"):
        check("2.2", Untouched)
    assert "still a stub" in progress.load()[0]["exercises"]["2.2"]["answer"]["tried"]


def test_in_a_notebook_a_class_is_found_judged_and_kept(tmp_path):
    heads = "forward(self, *args)", "finish(self)"
    methods = "\n".join(f"    def {head}:\n        return NotImplemented" for head in heads)
    head = "print()\nclass BucketedDDP(torch.nn.Module):\n    def __init__(self, module, bucket_bytes):\n        "
    stub = head + f'raise NotImplementedError("BucketedDDP is still a stub")\n{methods}\nprint()'
    partly = head + f"super().__init__()\n{methods}\nprint()"
    read = 'from labkit.check import progress\nprint(progress.load()[0]["exercises"]["2.2"]["answer"]["tried"])'
    cells = ["from labkit import check\nimport torch", stub, 'check("2.2")', partly, 'check("2.2")', read]
    built = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(built, timeout=120, allow_errors=True, resources={"metadata": {"path": tmp_path}})
    client.execute()
    causes = [
        output["data"][card.MIME]["cause"]
        for cell in built.cells
        for output in cell.outputs
        if card.MIME in output.get("data", {})
    ]
    assert causes == ["not_attempted", "half_attempted"]
    kept = built.cells[-1].outputs[0]["text"].rstrip()
    assert kept == partly.removeprefix("print()\n").removesuffix("\nprint()")
