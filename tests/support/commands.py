"""Commands as forks of a process that has imported their module, which takes a tenth of the time."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_FORKS = """
import json, os, sys
for request in sys.stdin:
    arguments, folder, environment, output = json.loads(request)
    child = os.fork()
    if child == 0:
        for number, name in enumerate((os.devnull, *output)):
            os.dup2(os.open(name, os.O_RDWR), number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["command", *arguments]
        main()
        sys.exit()
    print(os.waitpid(child, 0)[1], flush=True)
"""


def run_command(preparation: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `main` with these arguments, which the code of `preparation` has imported."""
    server = _server(preparation)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        output = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in output:
            file.touch()
        request = (arguments, str(Path.cwd()), dict(os.environ), [str(file) for file in output])
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = os.waitstatus_to_exitcode(int(server.stdout.readline()))
        return subprocess.CompletedProcess(arguments, code, *(file.read_text() for file in output))


@functools.cache
def _server(preparation: str) -> subprocess.Popen[str]:
    """Start the process that forks; it ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-c", preparation + _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
