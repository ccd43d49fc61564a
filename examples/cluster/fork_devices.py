"""`python -m examples.cluster.fork_devices` starts real device programs as forks of one process.

Fifty separate starts of `edge-client` need 4 GB and most of a minute on two cores; forks share what they have loaded.
Each line of its input is a JSON list of a log file and the arguments of `edge-client`. It ends its devices when its
input ends.
"""

import importlib
import json
import os
import signal
import sys

PRELOADED = ("numpy", "onnxruntime", "PIL.PngImagePlugin", "paho.mqtt.client", "edge_client.cli")


def main() -> None:
    """Start a device for each line."""
    for name in PRELOADED:
        importlib.import_module(name)
    devices: list[int] = []
    with open(0, "rb", buffering=0, closefd=False) as requests:
        while line := requests.readline():
            log, *arguments = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _run_device(log, arguments)
                return
            devices.append(pid)
    for pid in devices:
        os.kill(pid, signal.SIGTERM)
    for pid in devices:
        os.waitpid(pid, 0)


def _run_device(log: str, arguments: list[str]) -> None:
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        handle = os.open(path, flags, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    os.dup2(1, 2)
    sys.argv = ["edge-client", *arguments]
    from edge_client.cli import main as run_device

    run_device()


if __name__ == "__main__":
    main()
