"""Socket bytes of a child, read by its parent."""

import os
import socket

import pytest

from labkit.ranks.sockets import SocketBytes, socket_bytes

pytestmark = pytest.mark.skipif(socket_bytes(os.getpid()) is None, reason="this system shows no socket bytes")


def child_that_sends(sizes):
    """Pid of a child that sends each of `sizes` to itself over TCP, and the pipe ends to lead it by."""
    told, tell = os.pipe()
    wait, go = os.pipe()
    pid = os.fork()
    if pid:
        return pid, told, go
    try:
        server = socket.create_server(("127.0.0.1", 0))
        out = socket.create_connection(server.getsockname())
        into, _ = server.accept()
        for size in (0, *sizes):
            out.sendall(b"x" * size)
            while size:
                size -= len(into.recv(size))
            os.write(tell, b".")
            os.read(wait, 1)
    finally:
        os._exit(0)


def test_the_bytes_are_exactly_those_sent():
    pid, told, go = child_that_sends([10_000, 1])
    readings = []
    for _ in range(3):
        os.read(told, 1)
        readings.append(socket_bytes(pid))
        os.write(go, b".")
    os.waitpid(pid, 0)
    assert readings == [SocketBytes(0, 0), SocketBytes(10_000, 10_000), SocketBytes(10_001, 10_001)]
    assert readings[2] - readings[0] == SocketBytes(10_001, 10_001)


def test_a_process_that_is_gone_gives_none():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert socket_bytes(pid) is None


def test_descriptors_are_given_back():
    before = set(os.listdir("/proc/self/fd"))
    pair = socket.socketpair()
    for _ in range(50):
        socket_bytes(os.getpid())
    for each in pair:
        each.close()
    assert set(os.listdir("/proc/self/fd")) <= before  # others may have closed theirs meanwhile
