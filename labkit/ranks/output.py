"""Showing what ranks print: live with a rank tag, or in rank order at the end.

Left out: terminal control codes and carriage returns; progress bars of four ranks on one line help nobody.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

SHOWN_BYTES = 64 * 1024  # per rank: a notebook with ten megabytes of prints does not open again
KEPT_BYTES = 16 * 1024 * 1024  # per rank, in Outcome.output


@dataclass
class Output:
    """Takes chunks as they come and writes whole lines to sys.stdout, each tagged with its rank."""

    world_size: int
    mode: str  # live, ordered, quiet
    kept: list[bytearray] = field(default_factory=list)
    tails: list[bytearray] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.kept = [bytearray() for _ in range(self.world_size)]
        self.tails = [bytearray() for _ in range(self.world_size)]
        self.shown = [0] * self.world_size
        self.hidden = [0] * self.world_size

    def take(self, rank: int, chunk: bytes) -> None:
        """Note a chunk of what a rank wrote; show its whole lines when live."""
        room = KEPT_BYTES - len(self.kept[rank])
        self.kept[rank] += chunk[:room]
        if self.mode == "live":
            first, *rest = chunk.split(b"\n")
            room = max(0, SHOWN_BYTES - len(self.tails[rank]))
            self.tails[rank] += first[:room]
            self.hidden[rank] += len(first) - len(first[:room])
            if rest:
                lines = [bytes(self.tails[rank]), *rest[:-1]]
                self.tails[rank] = bytearray(rest[-1][:SHOWN_BYTES])
                self._show(rank, lines)

    def report(self, rank: int, values: dict) -> None:
        """Show a report as a line, when nobody asked for it as data."""
        line = "  ".join(f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
                         for name, value in values.items())
        self.take(rank, line.encode() + b"\n")

    def end(self) -> None:
        """Show what is left: last lines without a newline, and everything when prints are wanted in order."""
        for rank in range(self.world_size):
            if self.mode == "ordered":
                self._show(rank, bytes(self.kept[rank]).rstrip(b"\n").split(b"\n") if self.kept[rank] else [])
            elif self.tails[rank] and self.mode == "live":
                self._show(rank, [bytes(self.tails[rank])])
            self.tails[rank].clear()
            if self.hidden[rank]:
                print(f"[rank {rank}] … {self.hidden[rank] / 1e6:.1f} MB more printed, not shown")
        sys.stdout.flush()

    def _show(self, rank: int, lines: list[bytes]) -> None:
        text = []
        for line in lines:
            if self.shown[rank] + len(line) > SHOWN_BYTES:
                self.hidden[rank] += len(line) + 1
                continue
            self.shown[rank] += len(line) + 1
            text.append(f"[rank {rank}] {line.decode(errors='replace')}\n")
        if text:
            sys.stdout.write("".join(text))
            sys.stdout.flush()

    def texts(self) -> tuple[str, ...]:
        """Everything kept, per rank."""
        return tuple(bytes(kept).decode(errors="replace") for kept in self.kept)
