"""Live curves: what ranks report is what is drawn, in one output that is changed in place; nothing ends a training."""

import base64
import io

import matplotlib.pyplot as plt
import nbclient
import nbformat
import pytest

from labkit.ranks.launch import launch
from labkit.view import live

PNG = b"\x89PNG\r\n\x1a\n"
CELLS = """
import sys
sys.modules["ipywidgets"] = None  # as if it were not installed
import torch, torch.distributed as dist, labkit
from labkit.model.llama import Llama, Shape, loss_of
from labkit.model.text import batches
from labkit.view import live

def train():
    torch.manual_seed(0)
    model = Llama(Shape(hidden=32, heads=2, kv_heads=1, ffn=64, layers=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (tokens, targets) in enumerate(batches(2, 16, 0, dist.get_rank(), dist.get_world_size(), 40)):
        loss = loss_of(model(tokens), targets)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        labkit.report(step=step, loss=loss.item())

with live.losses(every_s=0.0) as watch:
    labkit.launch(train, 2, on_report=watch)
print("LOSSES", [sorted(watch.points), len(watch.mean), watch.mean[0] - watch.mean[39]])
"""


@pytest.fixture
def shown(monkeypatch):
    """PNGs in the order in which they were shown, as in a notebook."""
    pictures = []
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "_shower", lambda: pictures.append)
    return pictures


def line(watch, label):
    found = next(line for line in watch._ax.get_lines() if line.get_label() == label)
    return list(found.get_xdata()), list(found.get_ydata())


def test_every_rank_has_its_line_and_their_mean_one_more(shown):
    with live.losses(reference=[3.0, 2.0, 1.0], label="alone") as watch:
        for step in range(3):
            for rank in (1, 0):
                watch(rank, {"step": step, "loss": 3.0 - step + rank})
    assert line(watch, "rank 1") == ([0, 1, 2], [4.0, 3.0, 2.0])
    assert line(watch, "mean of ranks") == ([0, 1, 2], [3.5, 2.5, 1.5]) and watch.mean == {0: 3.5, 1: 2.5, 2: 1.5}
    assert line(watch, "alone") == ([0, 1, 2], [3.0, 2.0, 1.0])
    alone = next(line for line in watch._ax.get_lines() if line.get_label() == "alone")
    others = [line for line in watch._ax.get_lines() if line is not alone]
    assert alone.get_marker() == "o" and not any(line.get_marker() == "o" for line in others)
    assert alone.get_zorder() > max(line.get_zorder() for line in others)
    assert [text.get_text() for text in watch._ax.get_legend().get_texts()] == [
        "alone", "mean of ranks", "rank 0", "rank 1",
    ]  # fmt: skip
    assert watch._ax.get_title() == "loss 1.500 at step 2"


def test_a_mean_is_taken_of_steps_that_all_ranks_have_reported(shown):
    with live.losses() as watch:
        watch(0, {"step": 0, "loss": 4.0})
        watch(1, {"step": 0, "loss": 2.0})
        watch(1, {"step": 1, "loss": 1.0})
    assert watch.mean == {0: 3.0}


def test_pictures_come_now_and_then_and_a_last_one_at_the_end(shown):
    with live.losses(every_s=3600.0) as watch:
        assert len(shown) == 1  # an empty one, so that the reader sees where to look
        for step in range(100):
            watch(0, {"step": step, "loss": 1.0})
        assert len(shown) == 1
    assert len(shown) == 2 and all(png.startswith(PNG) for png in shown) and shown[0] != shown[1]
    watch.draw()
    assert len(shown) == 2  # nothing new


def test_a_reference_sets_the_axis_of_losses_and_zero_is_not_on_it(shown):
    with live.losses(reference=[3.0, 2.5, 2.0]) as watch:
        low, high = watch._ax.get_ylim()
    assert 1.8 < low < 2.0 and 3.0 < high < 3.2
    with live.losses(reference=[2.0, 2.0]) as watch:
        assert watch._ax.get_ylim() == (1.8, 2.2)


def test_a_picture_grows_with_values_beyond_its_axes(shown):
    with live.losses(reference=[1.0] * 5) as watch:
        watch(0, {"step": 200, "loss": 7.5})
    assert watch._ax.get_xlim()[1] >= 200 and watch._ax.get_ylim()[1] >= 7.5


@pytest.mark.parametrize(
    "values",
    [{}, {"step": 1}, {"loss": 1.0}, {"step": "one", "loss": 1.0}, {"step": 1, "loss": float("nan")},
     {"step": 1, "loss": "low"}, {"step": None, "loss": 1.0}, {"step": True, "loss": 1.0}, None, 3,
     {"step": 0, "loss": 10**400}, {"step": 0, "loss": 1.7e308}, {"step": 10**300, "loss": 1.0}],
)  # fmt: skip
def test_a_report_of_something_else_is_passed_over(shown, values):
    with live.losses(every_s=0.0) as watch:
        watch(0, values)
        watch(None, {"step": 1, "loss": 1.0})
    assert watch.points == {} and watch.mean == {}


@pytest.mark.parametrize("worst", [float("inf"), float("nan"), 1e300])
def test_a_reference_that_diverged_is_drawn_as_far_as_it_goes(shown, worst):
    with live.losses(reference=[2.0, 1.0, worst], every_s=0.0) as watch:
        watch(0, {"step": 1, "loss": 3.0})
    assert watch._ax.get_ylim()[1] == 3.0 and len(shown) >= 2


def test_any_quantity_can_be_watched(shown):
    with live.losses(name="accuracy") as watch:
        watch(0, {"step": 0, "accuracy": 0.25, "loss": 9.0})
    assert watch.mean == {0: 0.25} and watch._ax.get_ylabel() == "accuracy"


def reports(steps):
    from labkit.ranks.rank import report

    for step in range(steps):
        report(step=step, loss=1.0 / (1 + step))


def test_in_a_terminal_the_last_value_is_printed(capsys):
    with live.losses() as watch:
        launch(reports, 3, 4, on_report=watch)
    assert capsys.readouterr().out == "loss at step 3: 0.25, mean of 3 ranks\n"


def test_an_error_within_the_block_is_not_swallowed(shown):
    with pytest.raises(KeyError), live.losses() as watch:
        watch(0, {"step": 0, "loss": 1.0})
        raise KeyError("the training's own")
    assert len(shown) == 2


def test_in_a_kernel_without_widgets_one_output_is_changed_in_place_and_losses_fall():
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(CELLS)], metadata={"kernelspec": {"name": "python3", "display_name": ""}}
    )
    updates = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, cell_index):
            updates.append(message["msg_type"])
            return super().process_message(message, cell, cell_index)

    Client(notebook, timeout=120).execute()
    outputs = notebook.cells[0].outputs
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 1 and updates.count("update_display_data") >= 2
    told = "".join(output.get("text", "") for output in outputs).split("LOSSES ")[1]
    ranks, steps, fell = eval(told)
    assert ranks == [0, 1] and steps == 40 and fell > 1.0
    # The picture that is left is the last one: the mean's line goes right across.
    pixels = plt.imread(io.BytesIO(base64.b64decode(pictures[0]["data"]["image/png"])))
    assert pixels.shape[0] > 100 and pixels.std() > 0
