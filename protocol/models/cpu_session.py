"""ONNX Runtime sessions on the CPU for graphs of this project's own."""

import re
from pathlib import Path
from typing import Any

from protocol.threads import available_cores


def cpu_options() -> Any:
    """Return options of a session that uses the available cores.

    Without a number of threads, ONNX Runtime starts one for each core of the machine and binds it to that core. Outside
    of the process's cores this fails in a container, with a line on stderr, and overrides `taskset`.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = available_cores()
    options.log_severity_level = 3  # errors
    return options


def cpu_session(file: Path | bytes, options: Any = None) -> Any:
    """Open an ONNX file, given by its path or bytes."""
    import onnxruntime

    source = file if isinstance(file, bytes) else str(file)
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(source, options or cpu_options(), providers=providers)  # noqa: TID251


def reason(error: Exception) -> str:
    """Return the reason in an ONNX Runtime error, without paths and places in its source."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if found := re.search(r"Opset (\d+) is under development.* till opset (\d+)", lines[0]):
        return (
            f"it has opset {found[1]}, and this ONNX Runtime supports {found[2]}: upgrade ONNX Runtime, or export the "
            f"file with opset {found[2]} or lower"
        )
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", lines[0])
    text = re.sub(r"^Load model from .*? failed:", "", text)
    return re.sub(r"^\S+\.(cc|h):\d+ .*?\) ", "", text)[:200].strip()
