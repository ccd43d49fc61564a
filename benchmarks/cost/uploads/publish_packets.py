"""A process that sends a file of MQTT packets to the broker on this machine: PORT, FILE, how many publications.

It only copies bytes to a socket, so that it is never the bottleneck.
"""

import socket
import sys
import threading
from pathlib import Path

CONNECT = bytes.fromhex("10 10 0004 4d515454 04 02 0000 0004 6c6f6164")
"""MQTT 3.1.1, a clean session, no keep-alive, client id `load`."""
PUBACK_BYTES = 4


def publish(port: int, path: Path, messages: int) -> None:
    """Report the start on stdout, send everything, and wait until the broker has acknowledged each publication."""
    with socket.create_connection(("127.0.0.1", port)) as connection, path.open("rb") as file:
        connection.sendall(CONNECT)
        connection.recv(PUBACK_BYTES)
        print("publishing", flush=True)
        reader = threading.Thread(target=_read, args=(connection, messages * PUBACK_BYTES))
        reader.start()
        connection.sendfile(file)
        reader.join()


def _read(connection: socket.socket, size_bytes: int) -> None:
    while size_bytes > 0 and (data := connection.recv(65536)):
        size_bytes -= len(data)


if __name__ == "__main__":
    publish(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
