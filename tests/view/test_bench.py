"""The bench of the explorers draws what it times: a move each, in one kernel. Times are `make bench`'s."""

from tests.bench import exploring


def test_every_explorer_and_its_fresh_figure_are_drawn_by_the_bench():
    once = "ours(places[0]), theirs(places[0])\nprint('drawn')\n"
    cells = [*exploring.EXPLORERS.values(), *exploring.PICTURES.values()]
    told = "\nprint('BENCH[0, 0]')\n"
    assert exploring.medians(exploring.START + "".join(cell + once for cell in cells) + told) == (0, 0)
