"""The bucket explorer: what is drawn is the cut that the arithmetic gives, for any setting; moved as drawn afresh."""

import io

import matplotlib.pyplot as plt
import pytest

from labkit.cost import hardware
from labkit.labs.lab02 import recut
from labkit.labs.lab02.recorded import Step
from labkit.view import buckets
from tests.record.played import collective, compute, records, wait

MIB = 2**20
# Forward of 4e9 FLOPs, then four gradients of 1 MiB, each after 2e9 more; what comes after is the averaging.
FORWARD, EACH = 4 * 10**9, 2 * 10**9
SIZES = (MIB,) * 4


def step_of():
    """A recorded step by hand: parameters 0 ... 3, whose gradients come last first."""
    ops = [compute(FORWARD), *[compute(EACH) for _ in range(4)]]
    averaging = [each for _ in range(4) for each in (collective(range(2), MIB), wait(None, True))]
    made = records([*ops, *averaging], [*ops, *averaging])
    return Step(tuple(made), (1.0,), 1, tuple((4 - place, MIB) for place in range(4)))


@pytest.fixture
def made(monkeypatch):
    """An explorer and the two Axes of its picture."""
    kept, original = {}, buckets._picture

    def watched():
        kept["figure"], draw = original()
        return kept["figure"], draw

    monkeypatch.setattr(buckets, "_picture", watched)
    found = buckets.buckets(step_of(), bucket_bytes=MIB)
    return found, *kept["figure"].axes


def boxes(ax, kind):
    """(lane, left, right) in percent of the bars of one kind."""
    artist = next(each for each in ax.collections if each.get_label() == kind)
    corners = [path.vertices for path in artist.get_paths()]
    return [(round((c[0][1] + c[2][1]) / 2), c[0][0], c[1][0]) for c in corners]


def by_textbook(size, ranks, link, device):
    """(naive_s, bucketed_s) of the step, written out: buckets of `size` equal gradients each."""
    wire, chip = hardware.link(link), hardware.device(device)
    peak, memory = chip.peak("fp32"), chip.memory_bandwidth
    forward_s, each_s = FORWARD / peak, EACH / peak

    def ring_s(num_bytes):
        return wire.call_s + 2 * (ranks - 1) * wire.alpha_s + 2 * (ranks - 1) / ranks * num_bytes / wire.bandwidth

    compute_s = forward_s + 4 * each_s
    naive_s = compute_s + 4 * (ring_s(MIB) + 2 * MIB / memory)
    end_s, late_s, ends = 0.0, 0.0, []
    for number in range(1, 4 // size + 1):
        late_s += 2 * size * MIB / memory
        end_s = max(end_s, forward_s + number * size * each_s + late_s) + ring_s(size * MIB)
        ends.append(end_s)
    now = compute_s + late_s
    for end_s in ends:
        now = max(now, end_s) + 2 * size * MIB / memory
    return naive_s, now


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("ranks", "link", "device"), [(4, "PCIe 3", "T4"), (64, "10 GbE", "H100"), (2, "NVLink 4", "A100-40")]
)
def test_the_times_are_the_textbooks(made, size, ranks, link, device):
    found, lanes, curve = made
    for name, value in {"bucket_bytes": size * MIB, "ranks": ranks, "link": link, "device": device}.items():
        found.controls[name].value = value
    naive_s, bucketed_s = by_textbook(size, ranks, link, device)
    mark = next(line for line in curve.get_lines() if line.get_marker() == "o")
    assert mark.get_xdata()[0] == size * MIB
    assert mark.get_ydata()[0] == pytest.approx(100 * bucketed_s / naive_s, rel=1e-9)
    assert max(right for lane, _, right in boxes(lanes, "communication") if lane == 1) < 100.0001
    assert len([1 for lane, *_ in boxes(lanes, "communication") if lane == 3]) == 4 // size
    ends = [right for kind in ("forward", "backward", "waiting") for lane, _, right in boxes(lanes, kind) if lane == 2]
    assert max(ends) == pytest.approx(100 * bucketed_s / naive_s, rel=1e-6)


def test_the_curve_is_every_size_and_the_floor_is_computing_alone(made):
    found, _, curve = made
    line, floor, _ = curve.get_lines()
    naive_s, _ = by_textbook(1, 4, "PCIe 3", "T4")
    due = {MIB: 1, 2 * MIB: 2, 4 * MIB: 4}
    for size, count in due.items():
        at = list(line.get_xdata()).index(size)
        assert line.get_ydata()[at] == pytest.approx(100 * by_textbook(count, 4, "PCIe 3", "T4")[1] / naive_s, rel=1e-9)
    compute_s = (FORWARD + 4 * EACH) / hardware.device("T4").peak("fp32")
    assert floor.get_ydata()[0] == pytest.approx(100 * compute_s / naive_s, rel=1e-9)


def test_bars_of_a_lane_follow_one_another_without_a_gap_or_an_overlap(made):
    found, lanes, _ = made
    for link in ("NVLink 4", "10 GbE"):
        found.controls["link"].value = link
        for lane in (0, 2):
            held = sorted(
                (a, b) for kind in ("forward", "backward", "waiting") for at, a, b in boxes(lanes, kind) if at == lane
            )
            assert held[0][0] == 0
            ends, begins = [end for _, end in held[:-1]], [begin for begin, _ in held[1:]]
            assert ends == pytest.approx(begins, abs=1e-6)


def test_the_title_says_what_is_exposed(made):
    found, lanes, _ = made
    found.controls["bucket_bytes"].value = 4 * MIB
    assert lanes.get_title().startswith("4 MiB: 1 bucket, ") and "; one by one " in lanes.get_title()
    naive, by_size = buckets.cuts(
        recut.backward_of(step_of(), hardware.device("T4")), hardware.device("T4"), hardware.link("PCIe 3"), 4
    )
    assert buckets.reading(naive, by_size[4 * MIB], 4 * MIB) == lanes.get_title()


def test_a_cluster_of_ones_own_can_be_chosen():
    own = hardware.cluster("RTX 4090", per_node=2, intra="25 GbE")
    found = buckets.buckets(step_of(), also=own, link="25 GbE", device="RTX 4090", ranks=2)
    assert found.values["link"] == "25 GbE" and found.values["device"] == "RTX 4090"
    with pytest.raises(Exception, match="Invalid selection"):
        buckets.buckets(step_of(), link="a wire of dreams")


def test_a_move_is_the_picture_drawn_afresh():
    state = {"bucket_bytes": 4 * MIB, "ranks": 32, "link": "10 GbE", "device": "H100"}
    moved, afresh = buckets.buckets(step_of()), buckets.buckets(step_of(), **state)
    for name, value in state.items():
        moved.controls[name].value = value
    one, other = (plt.imread(io.BytesIO(bytes(found.image.value))) for found in (moved, afresh))
    assert one.shape == other.shape and (one == other).all()


def test_every_control_has_a_label_and_takes_the_keyboard(made):
    controls = made[0].controls
    assert {type(control).__name__ for control in controls.values()} == {"Dropdown", "SelectionSlider"}
    assert all(control.description for control in controls.values())
    assert "image/png" in made[0]._repr_mimebundle_()


def test_every_setting_gives_a_step_that_fits_the_axes():
    step = step_of()
    for device in buckets.DEVICES:
        backward = recut.backward_of(step, hardware.device(device))
        for link in buckets.LINKS:
            for ranks in buckets.RANKS:
                naive, by_size = buckets.cuts(backward, hardware.device(device), hardware.link(link), ranks)
                assert all(100 * cut.time_s / naive.time_s < buckets.MOST for cut in by_size.values())
