"""The tensor-parallel explorer: what is drawn is what the cost model gives; moved as drawn afresh."""

import pytest

from labkit.cost import hardware
from labkit.cost.tensor_parallel import layer_time, llama_like
from labkit.view import curves, explore, tensor


@pytest.fixture
def made(monkeypatch):
    """An explorer and the two Axes of its picture."""
    kept, original = {}, tensor._picture

    def watched():
        kept["figure"], draw = original()
        return kept["figure"], draw

    monkeypatch.setattr(tensor, "_picture", watched)
    found = tensor.tensor()
    return found, *kept["figure"].axes


def curves_of(ax):
    return {int(line.get_label().split()[0]): line for line in ax.get_lines() if line.get_label().endswith(" ranks")}


SETTINGS = [
    {"ranks": 16, "hidden": 8192, "tokens": 16384, "device": "A100-80", "per_node": 8, "within": "NVLink 3",
     "between": "InfiniBand HDR"},
    {"ranks": 4, "hidden": 512, "tokens": 1024, "device": "T4", "per_node": 2, "within": "PCIe 3",
     "between": "25 GbE"},
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_curves_and_marks_are_the_cost_models(made, setting):
    found, left, right = made
    for name, value in setting.items():
        found.controls[name].value = value
    card, dtype = hardware.device(setting["device"]), "fp16" if setting["device"] == "T4" else "bf16"
    set_to = tensor.Setting(*(setting[name] for name in ("tokens", "device", "per_node", "within", "between")))

    def cost(ranks, hidden):
        group = tensor.group_of(set_to, ranks)
        return layer_time(llama_like(hidden), setting["tokens"], min(4096, setting["tokens"]), card, group, dtype)

    for ranks in tensor.RANKS:
        cut = [cost(ranks, hidden) for hidden in tensor.HIDDEN]
        assert list(curves_of(left)[ranks].get_ydata()) == pytest.approx([100 * each.share for each in cut])
        speed = [cost(1, hidden).time_s / each.time_s for hidden, each in zip(tensor.HIDDEN, cut, strict=True)]
        assert list(curves_of(right)[ranks].get_ydata()) == pytest.approx(speed)
    at = tensor.HIDDEN.index(setting["hidden"])
    for ax in (left, right):
        mark = next(line for line in ax.get_lines() if line.get_marker() == "o")
        assert list(mark.get_ydata()) == pytest.approx([curves_of(ax)[setting["ranks"]].get_ydata()[at]])


@pytest.mark.parametrize(("ranks", "per_node", "counts"), [(8, 8, (8,)), (8, 4, (4, 4)), (16, 8, (8, 8)), (2, 9, (2,))])
def test_ranks_fill_node_after_node(ranks, per_node, counts):
    group = tensor.group_of(tensor.Setting(512, "H100", per_node, "NVLink 4", "10 GbE"), ranks)
    assert group.counts == counts and group.num_nics == counts[0]


def test_a_mark_below_the_axis_stands_at_its_edge_and_the_title_tells(made):
    found, _, right = made
    for name, value in {"ranks": 16, "hidden": 256, "per_node": 1, "between": "10 GbE"}.items():
        found.controls[name].value = value
    mark = next(line for line in right.get_lines() if line.get_marker() == "o")
    assert list(mark.get_ydata()) == [tensor.SLOWEST]
    set_to = tensor.Setting(4096, "H100", 1, "NVLink 4", "10 GbE")
    assert tensor.faster(set_to, 16)[0] < tensor.SLOWEST
    assert f"{tensor.faster(set_to, 16)[0]:.3g} times" in right.figure._suptitle.get_text()


def test_small_models_get_slower_and_large_ones_faster():
    speeds = tensor.faster(tensor.Setting(4096, "H100", 8, "NVLink 4", "InfiniBand NDR"), 8)
    assert speeds[0] < 1 < speeds[-1] < 8 and list(speeds) == sorted(speeds)


def test_a_picture_that_was_moved_is_the_same_as_one_drawn_afresh(made):
    found = made[0]
    first = found.image.value
    found.controls["hidden"].value = 512
    assert found.image.value != first
    assert found.image.value == tensor.tensor(hidden=512).image.value


@pytest.mark.parametrize("device", tensor.DEVICES)
def test_the_title_says_the_cost_models_numbers_and_is_whole(made, device):
    found, left, right = made
    for hidden, tokens, per_node in ((16384, 65536, 1), (16384, 65536, 8), (256, 512, 2)):
        setting = {"device": device, "ranks": 16, "hidden": hidden, "tokens": tokens, "per_node": per_node}
        setting |= {"within": "PCIe 3", "between": "10 GbE"}
        for name, value in setting.items():
            found.controls[name].value = value
        set_to = tensor.Setting(tokens, device, per_node, "PCIe 3", "10 GbE")
        card, dtype = hardware.device(device), "fp16" if device == "T4" else "bf16"
        groups = [tensor.group_of(set_to, ranks) for ranks in (1, 16)]
        one, cut = (layer_time(llama_like(hidden), tokens, min(4096, tokens), card, g, dtype) for g in groups)
        title = right.figure._suptitle
        assert title.get_text() == (
            f"16 x {device} on {16 // per_node} nodes, hidden {hidden:,}, {tokens:,} tokens: a layer takes "
            f"{curves.as_time(cut.time_s)}, {cut.share:.0%} of it communication; "
            f"{curves.as_number(one.time_s / cut.time_s)} times one GPU's speed"
        )
        labels = [title, left.yaxis.label, right.yaxis.label, right.get_legend(), left.xaxis.label]
        boxes = [label.get_window_extent() for label in labels]
        whole = right.figure.bbox
        for box in boxes:
            assert box.x0 >= 0 and box.x1 <= whole.x1 and box.y0 >= 0 and box.y1 <= whole.y1
        assert boxes[0].y0 >= left.get_window_extent().y1 and boxes[3].x0 >= right.get_window_extent().x1


def test_every_setting_draws(made):
    found = made[0]
    for name in ("ranks", "hidden", "tokens", "device", "per_node", "within", "between"):
        for option in found.controls[name].options:
            value = option[1] if isinstance(option, tuple) else option
            found.controls[name].value = value
    assert found.values["between"] == explore.BETWEEN[-1]


def test_it_shows_itself_without_widgets_too(made):
    bundle = made[0]._repr_mimebundle_()
    assert bundle["image/png"] and "application/vnd.jupyter.widget-view+json" in bundle
