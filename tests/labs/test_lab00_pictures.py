"""Pictures of lab 00 from wrong answers: each is drawn or put into words, and none falsifies the lesson."""

import pytest
import torch
import torch.distributed as dist

from labkit.labs import lab00
from labkit.labs.lab00 import pictures

BALANCED = [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]


def star(tensor, root):
    if dist.get_rank() == root:
        for other in range(dist.get_world_size()):
            if other != root:
                dist.send(tensor, dst=other)
    else:
        dist.recv(tensor, src=root)
    return tensor


def nothing(*args):
    return None


def divides(*args):
    return 1 // 0


def a_word(*args):
    return "word"


def half_a_stub(tensor, root):
    return NotImplemented if dist.get_rank() else tensor


def to_the_next(tensor, root):
    """Ranks 2 and 3 swap between themselves; only rank 1 hears from the root."""
    rank = dist.get_rank()
    if rank in (0, 2):
        dist.send(tensor, dst=rank + 1)
    elif rank in (1, 3):
        dist.recv(tensor, src=rank - 1)
    return tensor


def all_receive(tensor, *args):
    dist.recv(tensor, src=(dist.get_rank() + 1) % dist.get_world_size())
    return tensor


def means_off(shards, values):
    """Mean of means minus mean."""
    means = [sum(values[row] for row in rows) / len(rows) for rows in shards]
    return sum(means) / len(means) - sum(values) / len(values)


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda n, r, w: range(n), "rows 0-9 twice or more"),
        (lambda n, r, w: range(r * 2, r * 2 + 2), "rows 8, 9 on no rank"),
        (lambda n, r, w: range(r * 3, r * 3 + 3), "2 rows that the data does not have"),
        (lambda n, r, w: range(r * 10**12, (r + 1) * 10**12), "3,999,999,999,990 rows that the data does not have"),
        (lambda n, r, w: range(r, n, w), "not blocks of rows"),
        (lambda n, r, w: range(n) if r == 3 else range(0), "shards of 10 and 0 rows"),
        (lambda n, r, w: list(BALANCED[r]), "not blocks of rows"),
    ],
)
def test_the_lesson_goes_on_with_balanced_shards_where_ours_cannot_be_used(fn, told):
    shards, title = lab00.rows_picture(fn, 10, 4)
    assert title.endswith(f"{told}\nthe lesson goes on with balanced ones")
    usable = pictures.usable_shards(shards, 10)
    assert usable == BALANCED
    assert means_off(usable, [float(n**3) for n in range(10)]) != 0
    assert all(0 <= row < 10 for rows in shards for row in rows)


@pytest.mark.parametrize("shards", [BALANCED, BALANCED[::-1], [range(0, 2), range(2, 5), range(5, 7), range(7, 10)]])
def test_shards_that_hold_every_row_once_are_used_as_they_are(shards):
    drawn, title = lab00.rows_picture(lambda n, r, w: shards[r], 10, 4)
    assert drawn == shards == pictures.usable_shards(drawn, 10)
    assert title.endswith("10 rows on 4 ranks")


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (nothing, "ranks 0-3 returned None"),
        (a_word, "ranks 0-3 returned a value of type str"),
        (divides, "raised ZeroDivisionError"),
        (lambda n, r, w: NotImplemented if r else range(3), "ranks 1-3 returned NotImplemented"),
    ],
)
def test_what_is_no_shard_is_told_beside_the_reference(fn, told):
    shards, title = lab00.rows_picture(fn, 10, 4)
    assert shards == BALANCED and told in title and "tensor_split" in title
    assert pictures.STUB not in title


def test_ranks_that_the_root_never_reaches_are_named():
    sent, title = lab00.broadcast_picture(to_the_next, star, 6)
    assert len(sent) == 2 and title == "to_the_next: 1 round; ranks 2-5 never reached"


@pytest.mark.parametrize(("fn", "said"), [(nothing, "no message"), (half_a_stub, "no message")])
def test_a_broadcast_that_sends_nothing_is_not_taken_for_a_stub(fn, said):
    sent, title = lab00.broadcast_picture(fn, star, 3)
    assert sent == () and title == f"{fn.__name__}: {said}; ranks 1, 2 never reached"


@pytest.mark.parametrize(("fn", "said"), [(divides, "ZeroDivisionError"), (all_receive, "receive")])
def test_why_a_broadcast_fails_is_in_the_title(fn, said):
    _, title = lab00.broadcast_picture(fn, star, 2)
    assert title.startswith(fn.__name__) and said in " ".join(title.split()) and "rank 1 never reached" in title


@pytest.mark.parametrize(
    ("fn", "said"), [(divides, "ZeroDivisionError"), (all_receive, "receive"), (a_word, "a value of type str")]
)
def test_a_ring_or_gather_that_cannot_be_drawn_shows_what_is_due_and_why(fn, said):
    before, after, title = lab00.ring_picture(fn, 2)
    assert after == before[::-1] and said in title and title.endswith("what is due")
    _, after, title = lab00.gather_picture(fn, rows=(1, 2), root=0)
    assert after == [[0, 10, 11], None] and said in title and title.endswith("what is due at rank 0")


def test_a_ring_or_gather_that_returns_nothing_says_so():
    _, after, title = lab00.ring_picture(nothing, 2)
    assert after == [None, None] and title == "nothing: ranks 0, 1 returned None"
    _, after, title = lab00.gather_picture(nothing, rows=(1, 2), root=1)
    assert after == [None, None] and title == "nothing: rank 1 returned None"


def test_a_comparison_with_torch_is_a_word_or_a_truth_and_never_an_error():
    ones = torch.ones(2)
    assert pictures.compared(NotImplemented, ones) == "not yet yours"
    assert pictures.compared(None, ones) == "None came back"
    assert pictures.compared([1.0], ones) == "a value of type list came back"
    assert pictures.compared(ones.clone(), ones) is True
    assert not any(pictures.compared(other, ones) for other in (ones + 1, ones.long(), torch.ones(3)))
