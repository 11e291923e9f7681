"""Answers to exercise 7.5, `beat_1f1b`: wrong ones with the cause each must be told, right ones, cheats."""


def _text(name, ranks, microbatches, placement, lists):
    lines = [f"schedule {name}: {ranks} ranks, {microbatches} microbatches, stages on ranks {placement}"]
    return "\n".join([*lines, *(f"rank {rank}: {' '.join(own)}" for rank, own in enumerate(lists))])


def _split(ranks, microbatches, late=lambda rank: rank):
    """1F1B with W put off by as many microbatches as the rank's number."""
    lists = []
    for rank in range(ranks):
        warm_up, own = min(microbatches, ranks - 1 - rank), []
        own += [f"{rank}F{i}" for i in range(warm_up)]
        put_off = []
        for i in range(microbatches):
            own += [f"{rank}F{i + warm_up}"] if i + warm_up < microbatches else []
            own.append(f"{rank}I{i}")
            put_off.append(f"{rank}W{i}")
            if len(put_off) > late(rank):
                own.append(put_off.pop(0))
        lists.append(own + put_off)
    return lists


def _whole(lists):
    """I and W that follow each other made one B."""
    found = []
    for own in lists:
        own = [action for action in own if "W" not in action]
        found.append([action.replace("I", "B") for action in own])
    return found


def put_off(ranks, microbatches):
    placement = " ".join(map(str, range(ranks)))
    return _text("put off", ranks, microbatches, placement, _split(ranks, microbatches))


def two_chunks(ranks, microbatches):
    """Interleaved, in groups of as many microbatches as ranks."""
    lists = []
    for rank in range(ranks):
        groups = range(0, microbatches, ranks)
        order = [(chunk, first + i) for first in groups for chunk in (0, 1) for i in range(ranks)]
        forwards = [f"{chunk * ranks + rank}F{i}" for chunk, i in order]
        backwards = [f"{(1 - chunk) * ranks + rank}B{i}" for chunk, i in order]
        first = min(len(order), 2 * (ranks - rank - 1) + ranks)
        own = forwards[:first]
        for forward, backward in zip(forwards[first:], backwards, strict=False):
            own += [forward, backward]
        lists.append(own + backwards[len(order) - first :])
    placement = " ".join(map(str, [*range(ranks), *range(ranks)]))
    return _text("two chunks", ranks, microbatches, placement, lists)


def one_f_one_b(ranks, microbatches):
    placement = " ".join(map(str, range(ranks)))
    return _text("1f1b", ranks, microbatches, placement, _whole(_split(ranks, microbatches)))


def w_at_once(ranks, microbatches):
    """Its I hands on early, and every W still comes between."""
    placement = " ".join(map(str, range(ranks)))
    lists = _split(ranks, microbatches, late=lambda rank: 0)
    return _text("at once", ranks, microbatches, placement, lists)


def gpipe(ranks, microbatches):
    lists = [[f"{rank}{kind}{i}" for kind in "FB" for i in range(microbatches)] for rank in range(ranks)]
    return _text("gpipe", ranks, microbatches, " ".join(map(str, range(ranks))), lists)


def forwards_first(ranks, microbatches):
    """Splits its backwards, but keeps everything in flight."""
    lists = [[f"{rank}{kind}{i}" for kind in "FIW" for i in range(microbatches)] for rank in range(ranks)]
    return _text("all", ranks, microbatches, " ".join(map(str, range(ranks))), lists)


def without_last_w(ranks, microbatches):
    return put_off(ranks, microbatches).rsplit(" ", 1)[0]


def w_first(ranks, microbatches):
    return put_off(ranks, microbatches).replace("0I1", "x").replace("0W1", "0I1").replace("x", "0W1")


def backward_first(ranks, microbatches):
    return put_off(ranks, microbatches).replace("1F0", "x").replace("1I0", "1F0").replace("x", "1I0")


def in_a_circle(ranks, microbatches):
    """Rank 0 ends its first microbatch before it begins the second, for which rank 1 waits."""
    lists = _whole(_split(ranks, microbatches))
    lists[0] = [f"0{kind}{i}" for i in range(microbatches) for kind in "FB"]
    lists[1] = [f"1{kind}{i}" for kind in "FB" for i in range(microbatches)]
    return _text("circle", ranks, microbatches, " ".join(map(str, range(ranks))), lists)


def done_twice(ranks, microbatches):
    return put_off(ranks, microbatches) + " " + put_off(ranks, microbatches).split()[-1]


def a_slip(ranks, microbatches):
    return put_off(ranks, microbatches).replace("0F1", "F01")


def a_list(ranks, microbatches):
    return _split(ranks, microbatches)


def nothing_returned(ranks, microbatches):
    put_off(ranks, microbatches)


def lines(ranks, microbatches):
    return put_off(ranks, microbatches).splitlines()


def played_greedily(ranks, microbatches):
    """Unit after unit, whatever is ready: I before F before W. Stages in a V, at most 3p forwards kept."""
    where, stages, done = [*range(ranks), *reversed(range(ranks))], 2 * ranks, {}
    lists, kept, unit = [[] for _ in range(ranks)], [0] * ranks, 0
    left = [(kind, stage, i) for kind in "IFW" for i in range(microbatches) for stage in reversed(range(stages))]

    def ready(kind, stage, i):
        needs = {"F": [("F", stage - 1)], "I": [("F", stage), ("I", stage + 1)], "W": [("I", stage)]}[kind]
        return all(done.get((*need, i), unit) < unit for need in needs if 0 <= need[1] < stages)

    while left:
        for rank in range(ranks):
            own = [each for each in left if where[each[1]] == rank and ready(*each)]
            own = [each for each in own if each[0] != "F" or kept[rank] < 3 * ranks]
            if not own:
                lists[rank].append(".")
                continue
            kind, stage, i = own[0]
            left.remove(own[0])
            done[kind, stage, i] = unit
            kept[rank] += {"F": 1, "I": 0, "W": -1}[kind]
            lists[rank].append(f"{stage}{kind}{i}")
        unit += 1
    return _text("greedy", ranks, microbatches, " ".join(map(str, where)), lists)


def for_four_and_eight(ranks, microbatches):
    return put_off(4, 8)


def half_of_them(ranks, microbatches):
    return put_off(ranks, microbatches // 2)


def on_the_wrong_rank(ranks, microbatches):
    return put_off(ranks, microbatches).replace("ranks 0 1", "ranks 1 0")


def by_labkit(ranks, microbatches):
    from labkit.schedule.grid import text
    from labkit.schedule.zero_bubble import zb_h1

    return text(zb_h1(ranks, microbatches))


def all_on_one_rank(ranks, microbatches):
    """One rank works without a gap; the others have nothing to do."""
    own = []
    for i in range(microbatches):
        own += [f"{stage}F{i}" for stage in range(ranks)] + [f"{stage}B{i}" for stage in reversed(range(ranks))]
    lists = [own, *[[] for _ in range(ranks - 1)]]
    return _text("alone", ranks, microbatches, " ".join(["0"] * ranks), lists)


def data_parallel(ranks, microbatches):
    """The whole model on every rank, each with its own microbatches: nobody ever waits."""
    share = microbatches // ranks
    lists = [[f"{r}{kind}{r * share + i}" for i in range(share) for kind in "FB"] for r in range(ranks)]
    return _copies(ranks, _text("alone", ranks, microbatches, " ".join(map(str, range(ranks))), lists))


def _copies(count, text):
    first, rest = text.split("\n", 1)
    return f"{first}, {count} copies\n{rest}"


def halves(ranks, microbatches):
    """Two pipelines, each on half of the ranks."""
    stages, share, lists = ranks // 2, microbatches // 2, []
    for rank in range(ranks):
        base = share * (rank >= stages)
        lists.append([f"{rank}{kind}{base + i}" for kind in "FB" for i in range(share)])
    return _copies(2, _text("halves", ranks, microbatches, " ".join(map(str, range(ranks))), lists))


def by_a_patched_clock(ranks, microbatches):
    return one_f_one_b(ranks, microbatches)


def stop_the_clock():
    """The cell that is run before the check."""
    from labkit.schedule.timing import Timing

    Timing.idle_share = property(lambda self: 0.0)


by_a_patched_clock.notebook = stop_the_clock

WRONG = [
    (one_f_one_b, "no_better"),
    (gpipe, ("in_flight", "no_better")),
    (forwards_first, "in_flight"),
    (without_last_w, "missing"),
    (w_first, "weight_first"),
    (backward_first, "backward_first"),
    (in_a_circle, "dependency"),
    (done_twice, "twice"),
    (a_slip, "unreadable"),
    (a_list, "wrong_type"),
    (nothing_returned, "wrong_type"),
    (lines, "wrong_type"),
    (for_four_and_eight, "other_sizes"),
    (on_the_wrong_rank, "misplaced"),
]
RIGHT = [put_off, two_chunks, w_at_once, played_greedily]
CHEATS = [
    (half_of_them, "other_sizes"),
    (by_labkit, "ready_made"),
    (all_on_one_rank, "no_better"),
    (data_parallel, "data_parallel"),
    (halves, "data_parallel"),
    (by_a_patched_clock, "patched"),
]
