"""Windows of time in which traced programs record the functions that they enter."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cost.processes import ROOT
from benchmarks.cost.ways import tracing


class Trace:
    """The windows that traced processes record, and what they have recorded, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / tracing.WINDOW).write_bytes(b"\0")
        program = f"from {tracing.__name__} import start\n\nstart()\n"
        (folder / "sitecustomize.py").write_text(program, encoding="utf-8")
        path = os.pathsep.join([str(folder), str(ROOT)])
        self.environment = {**os.environ, "PYTHONPATH": path, tracing.FOLDER: str(folder)}

    @contextlib.contextmanager
    def window(self, number: int) -> Iterator[None]:
        """Let the processes record while the context lasts."""
        with (self._folder / tracing.WINDOW).open("r+b", buffering=0) as file:
            file.write(bytes([number]))
            yield
            file.seek(0)
            file.write(b"\0")

    def functions(self, windows: tuple[int, ...]) -> list[str]:
        """Return the functions that were entered in all windows, in the order of the first one."""
        lines = [line for file in self._folder.glob("[0-9]*") for line in file.read_text().splitlines()]
        entries = sorted((int(time_ns), window, name) for window, time_ns, name in map(str.split, lines))
        seen = [{name: None for _, window, name in entries if window == str(each)} for each in windows]
        return [name for name in seen[0] if all(name in each for each in seen)]
