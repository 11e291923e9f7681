"""Bytes on a rank's own TCP sockets, read from outside the rank.

Here: one reader for a child process, by `pidfd_getfd` (a duplicate of each descriptor) and `TCP_INFO`.
A rank can write anything into its own record, but the kernel counts these bytes, so this is the strongest
evidence of what was sent. Left out: Unix sockets, pipes and shared memory, which carry no gloo traffic,
and connections that were closed before the reading, whose counts the kernel has thrown away.
"""

import ctypes
import os
import socket
import struct
from dataclasses import dataclass

PIDFD_GETFD = 438  # one system call number on every architecture that has it (Linux 5.6)
TCP_INFO_SIZE = 256
# Offsets into struct tcp_info of linux/tcp.h.
BYTES_ACKED, BYTES_RECEIVED, BYTES_SENT, BYTES_RETRANS = 120, 128, 200, 208


@dataclass(frozen=True)
class SocketBytes:
    """Payload bytes over the TCP sockets that a process has open."""

    sent: int
    received: int

    def __sub__(self, other: "SocketBytes") -> "SocketBytes":
        return SocketBytes(self.sent - other.sent, self.received - other.received)


def _number(info: bytes, offset: int) -> int:
    return struct.unpack_from("=Q", info, offset)[0]


def _counted(info: bytes) -> SocketBytes | None:
    """Sent and received payload of one TCP_INFO answer; None from a kernel without byte counts."""
    if len(info) < BYTES_RECEIVED + 8:
        return None
    received = _number(info, BYTES_RECEIVED)
    if len(info) >= BYTES_RETRANS + 8:
        # bytes_acked waits for the peer's delayed acknowledgement (up to 40 ms on loopback) and counts the
        # opening SYN as a byte; what was put on the wire, less what was put there twice, does neither.
        return SocketBytes(_number(info, BYTES_SENT) - _number(info, BYTES_RETRANS), received)
    return SocketBytes(_number(info, BYTES_ACKED), received)


def _tcp_info(descriptor: int) -> bytes:
    """TCP_INFO of a descriptor that we own, which is closed; b"" where it is not a TCP socket."""
    with socket.socket(fileno=descriptor) as sock:  # finds family, type and protocol by itself
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.proto != socket.IPPROTO_TCP:
            return b""
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_SIZE)


def _socket_descriptors(pid: int) -> list[int]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except FileNotFoundError:  # closed since it was listed
            continue
    return found


def socket_bytes(pid: int) -> SocketBytes | None:
    """Payload bytes sent and received over the open TCP sockets of process `pid`, summed.

    Called on a child or other descendant (Yama's default allows those). None where the system forbids or
    lacks it: not Linux, before 5.6, another user's process, a container without ptrace, a process that is gone.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError, TypeError):
        return None
    sent = received = 0
    try:
        for theirs in _socket_descriptors(pid):
            ours = libc.syscall(PIDFD_GETFD, pidfd, theirs, 0)
            if ours < 0:
                if ctypes.get_errno() == 9:  # EBADF: closed since it was listed
                    continue
                return None
            info = _tcp_info(ours)
            if info:
                counted = _counted(info)
                if counted is None:
                    return None
                sent, received = sent + counted.sent, received + counted.received
    except (OSError, AttributeError):
        return None
    finally:
        os.close(pidfd)
    return SocketBytes(sent, received)
