"""Frames on a stream socket: 8 bytes of length, then a tagged payload; and anonymous files shared with ranks.

Left out: pickling. What a payload means is the business of `launch` and `rank`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile

_LENGTH = struct.Struct("!Q")
_TAG_BYTES = 8


def anonymous_file(name: str) -> int:
    """A file descriptor of a file without a name: memory on Linux, an unlinked temporary file where that is not to
    be had (macOS; a sandbox that refuses it)."""
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    handle, path = tempfile.mkstemp(prefix="labkit-")
    os.unlink(path)
    return handle


def send_frame(sock: socket.socket, tag: str, payload: bytes = b"") -> None:
    """Send one frame, blocking until all of it is taken. Raises OSError when the other end is gone."""
    head = _LENGTH.pack(_TAG_BYTES + len(payload)) + tag.encode().ljust(_TAG_BYTES)
    sock.sendall(head + payload if len(payload) < 65536 else head)
    if len(payload) >= 65536:
        sock.sendall(payload)


def receive_frame(sock: socket.socket) -> tuple[str, bytes]:
    """Wait for one frame. Raises EOFError when the other end is gone."""
    (size,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    body = _receive_exactly(sock, size)
    return body[:_TAG_BYTES].decode().rstrip(), bytes(body[_TAG_BYTES:])


def _receive_exactly(sock: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        count = sock.recv_into(view[done:])
        if not count:
            raise EOFError("the other end closed the connection")
        done += count
    return buffer


class FrameReader:
    """Collects frames from a non-blocking socket, however the bytes arrive."""

    def __init__(self, sock: socket.socket):
        self.sock, self.buffer, self.closed = sock, bytearray(), False

    def read(self) -> list[tuple[str, bytes]]:
        """Frames complete by now. Sets `closed` at the end of the stream."""
        with contextlib.suppress(BlockingIOError):
            while not self.closed:
                try:
                    chunk = self.sock.recv(1 << 20)
                except ConnectionError:
                    chunk = b""
                self.closed = not chunk
                self.buffer += chunk
        frames = []
        while len(self.buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self.buffer)
            end = _LENGTH.size + size
            if len(self.buffer) < end:
                break
            body = bytes(self.buffer[_LENGTH.size : end])
            del self.buffer[:end]
            frames.append((body[:_TAG_BYTES].decode().rstrip(), body[_TAG_BYTES:]))
        return frames
