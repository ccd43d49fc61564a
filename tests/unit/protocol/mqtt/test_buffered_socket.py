import socket

import pytest

from protocol.mqtt.buffered_socket import BUFFER_BYTES, BufferedSocket


def test_bytes_are_received_once_and_in_order() -> None:
    """Whatever sizes are asked for; what was read ahead is pending; a socket without bytes blocks or ends as before."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        buffered = BufferedSocket(ours)
        with pytest.raises(BlockingIOError):
            buffered.recv(1)
        theirs.sendall(b"abcdef")
        assert (bytes(buffered.recv(1)), buffered.pending()) == (b"a", 5)
        assert (bytes(buffered.recv(3)), buffered.pending()) == (b"bcd", 2)
        theirs.sendall(b"gh")
        assert bytes(buffered.recv(BUFFER_BYTES)) == b"ef"
        assert bytes(buffered.recv(BUFFER_BYTES)) == b"gh"
        assert (buffered.pending(), buffered.fileno()) == (0, ours.fileno())
        theirs.close()
        assert bytes(buffered.recv(1)) == b""
