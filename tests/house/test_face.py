"""`import labkit` is light, its face is whole, and `labkit.check` is the function in any order of imports."""

import subprocess
import sys

import cloudpickle
import pytest

import labkit

HEAVY = {"torch", "numpy", "matplotlib", "IPython", "ipywidgets", "cloudpickle"}


def modules_after(code):
    """Top-level modules that a fresh interpreter has after running `code`."""
    script = f"import sys\n{code}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.check_output([sys.executable, "-c", script], text=True).splitlines()[-1].split())


def test_import_labkit_imports_nothing_heavy():
    assert modules_after("import labkit") & HEAVY == set()


@pytest.mark.parametrize(
    "code",
    [
        "from labkit import about; about()",
        "from labkit.doctor import environment; environment.examine().text()",
        "from labkit import launch, check",
        "from labkit import cli; cli._parser()",
    ],
)
def test_the_notebook_process_needs_no_torch_for(code):
    assert "torch" not in modules_after(code)


@pytest.mark.parametrize("name", labkit.__all__)
def test_a_name_of_the_face_is_there(name):
    assert callable(getattr(labkit, name))
    assert name in dir(labkit)


def test_the_face_is_about_a_dozen_names():
    assert len(labkit.__all__) <= 14
    assert sorted(labkit.__all__) == labkit.__all__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        labkit.lunch  # noqa: B018


@pytest.mark.parametrize("before", ["", "import labkit.check.card", "from labkit.check import progress"])
def test_check_is_the_function_whatever_was_imported_before(before):
    code = f"{before}\nfrom labkit import check\nimport labkit\n"
    code += "print(type(check).__name__, labkit.check is check)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "function True\n"


def test_a_function_that_names_labkit_can_be_sent():
    namespace = {}
    exec("import labkit\ndef where():\n    return labkit.__version__, labkit", namespace)
    sent = cloudpickle.loads(cloudpickle.dumps(namespace["where"]))
    assert sent() == (labkit.__version__, labkit)


def test_check_cannot_be_replaced():
    with pytest.raises(AttributeError, match="cannot be replaced"):
        labkit.check = print
