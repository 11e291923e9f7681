"""Every kind of fault, made by changing a valid schedule, is told its own cause. The changes are seeded.

What must be told is worked out here: circles by graphlib, messages that block by the replay of a record.
"""

import dataclasses
import graphlib
import random
import zlib

import pytest

from labkit.record.replay import replay
from labkit.schedule.actions import Action, Schedule, in_flight, needs
from labkit.schedule.classic import gpipe, one_f_one_b
from labkit.schedule.messages import plan, received, sent, taken
from labkit.schedule.validate import check_valid, validate
from tests.record import played
from tests.schedule.made import GRID, made

DRILLED = [(name, p, m) for name, p, m in GRID if m < 16]
SEEDS = range(3)


def chance(*key):
    return random.Random(zlib.crc32(repr(key).encode()))


def moved(own, action, place):
    """A list with one action of it at another place."""
    rest = [each for each in own if each != action]
    return (*rest[:place], action, *rest[place:])


def pick(rng, schedule, test=lambda action: True):
    """(rank, action) of a random action that passes a test."""
    return rng.choice([(rank, a) for rank, own in enumerate(schedule.actions) for a in own if test(a)])


def unknown_stage(rng, schedule):
    rank, action = pick(rng, schedule)
    wrong = Action(action.kind, len(schedule.placement), action.microbatch)
    own = [wrong if each == action else each for each in schedule.actions[rank]]
    return schedule.with_actions(rank, own), (str(wrong), f"rank {rank}", f"stages are 0 to {wrong.stage - 1}")


def unknown_microbatch(rng, schedule):
    rank, action = pick(rng, schedule)
    wrong = Action(action.kind, action.stage, schedule.microbatches)
    own = [wrong if each == action else each for each in schedule.actions[rank]]
    return schedule.with_actions(rank, own), (str(wrong), f"through stage {action.stage} pass microbatches")


def misplaced(rng, schedule):
    rank, action = pick(rng, schedule)
    other = (rank + 1) % schedule.ranks
    changed = schedule.with_actions(rank, [each for each in schedule.actions[rank] if each != action])
    own = list(schedule.actions[other])
    own.insert(rng.randrange(len(own) + 1), action)
    return changed.with_actions(other, own), (f"{action} of rank {other}", f"stage {action.stage} is on rank {rank}")


def missing(rng, schedule):
    rank, action = pick(rng, schedule)
    own = [each for each in schedule.actions[rank] if each != action]
    return schedule.with_actions(rank, own), (f"{action} is missing: rank {rank} never does it",)


def twice(rng, schedule):
    rank, action = pick(rng, schedule)
    own = list(schedule.actions[rank])
    own.insert(rng.randrange(len(own) + 1), action)
    first, second = [i for i, each in enumerate(own, 1) if each == action]
    return schedule.with_actions(rank, own), (f"rank {rank} does {action} twice, as actions {first} and {second}",)


def half_twice(rng, schedule):
    """A B and besides the W of the same."""
    rank, action = pick(rng, schedule, lambda a: a.kind == "B")
    own = (*schedule.actions[rank], Action("W", action.stage, action.microbatch))
    words = f"the weights' gradient of microbatch {action.microbatch} at stage {action.stage} twice, in {action}"
    return schedule.with_actions(rank, own), (f"rank {rank} does {words}",)


def backward_first(rng, schedule):
    rank, action = pick(rng, schedule, lambda a: a.kind in "BI")
    own = schedule.actions[rank]
    forward = Action("F", action.stage, action.microbatch)
    changed = moved(own, action, own.index(forward))
    return schedule.with_actions(rank, changed), (f"rank {rank} does {action} (action {own.index(forward) + 1})",
                                                  f"before {forward}")  # fmt: skip


def weight_first(rng, schedule):
    rank, action = pick(rng, schedule, lambda a: a.kind == "W")
    own = schedule.actions[rank]
    before = Action("I", action.stage, action.microbatch)
    changed = moved(own, action, own.index(before))
    return schedule.with_actions(rank, changed), (f"rank {rank} does {action}", f"before {before}")


CHANGES = {
    "unknown": (unknown_stage, unknown_microbatch),
    "misplaced": (misplaced,),
    "missing": (missing,),
    "twice": (twice, half_twice),
    "backward_first": (backward_first,),
    "weight_first": (weight_first,),
}
NEEDED_KIND = {half_twice: "B", weight_first: "W"}


@pytest.mark.parametrize("name, p, m", DRILLED)
def test_every_fault_is_told_its_own_cause(name, p, m, soak):
    schedule, told = made(name, p, m), 0
    kinds = {action.kind for own in schedule.actions for action in own}
    for code, changes in CHANGES.items():
        for change in changes:
            for seed in range(30) if soak else SEEDS:
                if NEEDED_KIND.get(change, "F") in kinds:
                    changed, words = change(chance(name, p, m, code, seed), schedule)
                    fault = validate(changed)
                    assert fault is not None and fault.code == code, (change.__name__, fault)
                    assert all(word in fault.sentence for word in words), (words, fault.sentence)
                    told += 1
    assert told >= 7 * len(SEEDS)


def shuffled(rng, schedule):
    """The same with an action or a few at other places, F, I and W of each microbatch still in order."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        rank, action = pick(rng, schedule)
        own = moved(schedule.actions[rank], action, rng.randrange(len(schedule.actions[rank])))
        changed = schedule.with_actions(rank, own)
        fault = validate(changed)
        if fault is None or fault.code == "dependency":
            schedule = changed
    return schedule


def has_circle(schedule):
    """Whether lists and needs together have one."""
    graph = {}
    makes = {result: action for own in schedule.actions for action in own for result in action.results}
    for own in schedule.actions:
        for before, action in zip((None, *own), own, strict=False):
            graph[action] = {makes[need] for need in needs(schedule, action)} | ({before} if before else set())
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return True
    return False


def test_a_wait_that_never_ends_is_told_and_only_that(soak):
    seen = []
    for name, p, m in DRILLED:
        for seed in range(60) if soak else range(6):
            schedule = shuffled(chance("shuffled", name, p, m, seed), made(name, p, m))
            fault = validate(schedule)
            assert (fault is not None) == has_circle(schedule)
            if fault is not None:
                assert fault.code == "dependency" and " waits before " in fault.sentence
                stuck = schedule.actions[fault.rank][fault.position - 1]
                assert f"rank {fault.rank} waits before {stuck} (action {fault.position})" in fault.sentence
            else:
                plan(schedule)
            seen.append(fault is not None)
    assert 0.1 < sum(seen) / len(seen) < 0.9, "both kinds occur"


def test_a_circle_of_two_names_both_ranks_and_what_they_wait_for():
    F, B = (lambda s, i: Action("F", s, i)), (lambda s, i: Action("B", s, i))
    lists = ((F(0, 0), B(0, 0), F(0, 1), B(0, 1)), (F(1, 0), F(1, 1), B(1, 0), B(1, 1)))
    fault = validate(Schedule("mine", 2, 2, (0, 1), lists))
    assert fault.sentence == (
        "rank 0 waits before 0B0 (action 2) for the backward of microbatch 0 at stage 1, from rank 1; "
        "rank 1 waits before 1F1 (action 2) for the forward of microbatch 1 at stage 0, from rank 0; nobody goes on"
    )
    alone = Schedule("mine", 1, 1, (0, 0), ((F(1, 0), F(0, 0), B(1, 0), B(0, 0)),))
    assert validate(alone).sentence.endswith("at stage 0, from itself, which it would do later")


@pytest.mark.parametrize("name, p, m", DRILLED)
def test_one_microbatch_too_many_in_flight_is_told_with_rank_and_place(name, p, m):
    schedule = made(name, p, m)
    most = [max(counts) for counts in in_flight(schedule)]
    assert validate(schedule, most) is None
    for rank in range(p):
        fault = validate(schedule, [count - (rank == r) for r, count in enumerate(most)])
        place = in_flight(schedule)[rank].index(most[rank]) + 1
        assert (fault.code, fault.rank, fault.position) == ("in_flight", rank, place)
        action = schedule.actions[rank][place - 1]
        stages = schedule.placement.count(rank)
        what = "microbatches" if stages == 1 else f"forwards of its {stages} stages"
        assert fault.sentence == (
            f"rank {rank} has {most[rank]} {what} in flight after {action} (action {place}); "
            f"at most {most[rank] - 1} may be"
        )


def record_of(schedule, rank, sends):
    """What a rank would record that sends so: messages alone, each known by a tag of its own."""
    events, after = [], None
    for action in (*schedule.actions[rank], None):
        before = received(schedule, action) if action is not None else None
        batch = [("send", after), ("recv", before)]
        batch = [(op, message) for op, message in batch if message is not None]
        for together in [batch] if sends == "paired" else [[each] for each in batch]:
            first = len(events)
            for op, message in together:
                tag = zlib.crc32(repr(dataclasses.astuple(message)).encode())
                peer = message.destination if op == "send" else message.source
                events.append(played.message(op, peer, tag=tag))
            events += [played.wait(first + i) for i in range(len(together))]
        after = sent(schedule, action) if action is not None else None
    return played.record(rank, schedule.ranks, *events)


@pytest.mark.parametrize("sends", ["blocking", "paired"])
def test_sends_that_wait_for_each_other_are_told_as_the_replay_tells_them(sends, soak):
    seen = set()
    for name, p, m in DRILLED:
        for seed in range(20) if soak else range(2):
            schedule = made(name, p, m)
            if seed:
                schedule = shuffled(chance("sends", name, p, m, seed), schedule)
            fault = validate(schedule, sends=sends)
            if fault is None or fault.code == "deadlock":
                records = [record_of(schedule, rank, sends) for rank in range(p)]
                assert bool(replay(records, played.by_hand()).deadlock) == (fault is not None), (name, p, m, seed)
                seen.add(fault is None)
    assert seen == {True, False}


def test_1f1b_with_blocking_sends_is_told_who_waits_for_whom_and_gpipe_is_fine():
    assert validate(gpipe(4, 8), sends="blocking") is None
    assert validate(one_f_one_b(4, 8), sends="paired") is None
    assert validate(one_f_one_b(2, 3), sends="blocking").sentence == (
        "rank 0 waits after 0F1 (action 2) to send rank 1 the output of stage 0, microbatch 1; rank 1 waits after 1B0 "
        "(action 2) to send rank 0 the input's gradient of stage 1, microbatch 0; nobody goes on"
    )


@pytest.mark.parametrize("name, p, m", DRILLED)
def test_a_plan_has_one_order_of_messages_for_all_ranks(name, p, m):
    schedule = made(name, p, m)
    steps = plan(schedule)
    graph = {}
    for rank, own in enumerate(steps):
        computed = [step.what for step in own if step.do == "compute"]
        assert tuple(computed) == schedule.actions[rank]
        posted = [step.what for step in own if step.do != "compute"]
        for before, message in zip((None, *posted), posted, strict=False):
            graph.setdefault(message, set()).update({before} if before else ())
        for step in own:  # a receive is posted before the action that needs it, a send after the one that makes it
            if step.do == "compute" and (message := received(schedule, step.what)) is not None:
                recvs = [i for i, each in enumerate(own) if each.do == "recv" and each.what == message]
                assert len(recvs) == 1 and recvs[0] < own.index(step)
    graphlib.TopologicalSorter(graph).prepare()


def most_under_way(schedule):
    """Per rank, the most sends that it keeps: until a message says that they are taken, else to the end."""
    steps, found = plan(schedule), []
    for own in steps:
        kept, most = set(), 0
        for step in own:
            if step.do == "send":
                kept.add(step.what)
            elif step.do == "compute" and (message := received(schedule, step.what)) is not None:
                kept.difference_update(taken(schedule, steps)[message])
            most = max(most, len(kept))
        found.append(most)
    return found


@pytest.mark.parametrize("name, p, m", DRILLED)
def test_what_is_let_go_of_was_needed_before_the_message_that_says_so(name, p, m):
    schedule = made(name, p, m)
    steps = plan(schedule)
    known = taken(schedule, steps)
    each = [message for messages in known.values() for message in messages]
    assert len(each) == len(set(each)) and set(known) == {s.what for own in steps for s in own if s.do == "send"}
    for said, messages in known.items():
        own = steps[said.source]
        sending = next(i for i, step in enumerate(own) if step.do == "send" and step.what == said)
        for message in messages:
            assert (message.source, message.destination) == (said.destination, said.source)
            assert any(s.do == "compute" and received(schedule, s.what) == message for s in own[:sending])


def test_sends_under_way_do_not_grow_with_the_microbatches():
    for name in ("1f1b", "zb_h1", "zb_v", "interleaved"):
        assert most_under_way(made(name, 4, 16)) == most_under_way(made(name, 4, 32)), name
    assert most_under_way(one_f_one_b(2, 16)) == [2, 2]


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ValueError, match="sends is 'eager'; it can be isend, paired, blocking"):
        validate(gpipe(2, 2), sends="eager")
    with pytest.raises(ValueError, match="3 limits of microbatches in flight for 2 ranks"):
        validate(gpipe(2, 2), [1, 2, 3])
    with pytest.raises(ValueError, match="schedule GPipe: 0B1 is missing"):
        check_valid(gpipe(2, 2).with_actions(0, gpipe(2, 2).actions[0][:-1]))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Action("X", 0, 0), "an action's kind is one of F, B, I, W, not 'X'"),
        (lambda: Action("F", -1, 0), "numbered from 0"),
        (lambda: Schedule("s", 0, 1, (0,), ()), "are 1 or more"),
        (lambda: Schedule("s", 1, 1, (0, 1), ((),)), "stage 1 is on rank 1, but ranks are 0 to 0"),
        (lambda: Schedule("s", 2, 1, (0, 1), ((),)), "1 lists of actions for 2 ranks"),
        (lambda: Schedule("s", 1, 3, (0, 0), ((),), 2), "3 microbatches cannot be shared out among 2 copies"),
        (lambda: Schedule("s", 1, 2, (0,), ((),), 2), "1 stages cannot be shared out among 2 copies"),
    ],
)
def test_what_is_no_schedule_is_refused_when_it_is_made(make, words):
    with pytest.raises(ValueError, match=words):
        make()
