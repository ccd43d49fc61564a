"""Which functions of the project a process enters is recorded for each phase, also in its threads and children."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.function_calls import FOLDER, PROGRAM, ROOT

PROGRAM_TEXT = """\
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.function_calls import record

record()
from protocol.retry_delay import retry_delay_s
from protocol.threads import available_cores

phase = Path(os.environ["PROTOFLEET_CALLS"]) / "phase"
retry_delay_s(1)
with phase.open("r+b") as file:
    file.write(bytes([1]))
with ThreadPoolExecutor() as pool:
    pool.submit(available_cores).result()
retry_delay_s(2)
if os.fork() == 0:
    from protocol.wire.topics import device_filters
    device_filters("fleet")
    os._exit(0)
os.wait()
"""


def test_functions_are_recorded_once_a_phase(tmp_path: Path) -> None:
    (tmp_path / "phase").write_bytes(bytes([0]))
    variables = {FOLDER: str(tmp_path), PROGRAM: "program", "PYTHONPATH": ROOT}
    subprocess.run([sys.executable, "-c", PROGRAM_TEXT], env={**os.environ, **variables}, check=True)
    lines = (tmp_path / "program").read_text(encoding="utf-8").splitlines()
    assert sorted(lines) == [
        "0\tprotocol/retry_delay.py:retry_delay_s",
        "1\tprotocol/retry_delay.py:retry_delay_s",
        "1\tprotocol/threads.py:available_cores",
        "1\tprotocol/wire/topics.py:device_filters",
    ]
