"""The words of a finding: ranks, calls and places as the reader knows them. Left out: what is true (`verdict`)."""

from collections.abc import Iterable, Sequence

from labkit.ranks.ledger import Entry
from labkit.ranks.places import readable


def listed(items: Iterable[object]) -> str:
    """"0", "0 and 1", "0, 1 and 3"."""
    texts = [str(item) for item in items]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def ranks(numbers: Iterable[int]) -> str:
    """"rank 2" or "ranks 0, 1, 3"."""
    numbers = sorted(numbers)
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def verb(numbers: Sequence[int], one: str, many: str) -> str:
    """The form that agrees with so many ranks."""
    return one if len(numbers) == 1 else many


def at(entries: Iterable[Entry]) -> str:
    """" (cell 12, line 3)", each different place once, the first four; "" when none is known."""
    return in_brackets(entry.place for entry in entries)


def in_brackets(raw_places: Iterable[str]) -> str:
    """As `at`, for raw places."""
    known = list(dict.fromkeys(readable(place) for place in raw_places if place))
    if not known:
        return ""
    shown = "; ".join(known[:4]) + ("; …" if len(known) > 4 else "")
    return f" ({shown})"


def call(entry: Entry, world_size: int) -> str:
    """"all_reduce #4", "all_reduce #1 of ranks 0, 2" in a smaller group, "send #0 to rank 1", with its tag if any."""
    name = f"{entry.op} #{entry.sequence}"
    tag = f" with tag {entry.tag}" if entry.tag else ""
    if entry.op == "send":
        return f"{name} to rank {entry.root}{tag}"
    if entry.op == "recv":
        return f"{name} from {'any rank' if entry.root is None else f'rank {entry.root}'}{tag}"
    return name + ("" if len(entry.ranks) in (0, world_size) else f" of {ranks(entry.ranks)}")


def tensor(entry: Entry) -> str:
    """"shape (4,) float32"."""
    return f"shape {entry.shape} {entry.dtype}".rstrip()
