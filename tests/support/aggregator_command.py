"""Runs the `aggregator` program to its end."""

import subprocess
import sys

WITHOUT_TORCH = """\
import sys
for heavy in ("torch", "onnx", "onnxscript", "amqtt"):
    sys.modules[heavy] = None
from aggregator.cli import main
main()
"""
"""The program on a machine that lacks the large packages."""
PROGRAM = "from aggregator.cli import main; main()"


def run_aggregator(*arguments: str, program: str = WITHOUT_TORCH) -> subprocess.CompletedProcess[str]:
    """Run a command; return its exit status and output."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
