"""The reason comes first in errors of ONNX Runtime, and files beyond the oldest supported one are refused."""

import tomllib
from pathlib import Path

import pytest

from protocol.errors import GraphRefused
from protocol.models.cpu_session import reason
from protocol.models.onnx_validation import MAX_OPSET, OLDEST_RUNTIME, check_versions

ROOT = Path(__file__).resolve().parents[4]
PLACE = (
    "/onnxruntime_src/onnxruntime/core/graph/model_load_utils.h:46 void onnxruntime::model_load_utils::"
    "ValidateOpsetForDomain(const std::unordered_map<std::__cxx11::basic_string<char>, int>&, bool, int) "
)
OPSET = (
    "ONNX Runtime only *guarantees* support for models stamped with official released onnx opset versions. Opset 23 "
    "is under development. Current official support for domain ai.onnx is till opset 21."
)
UPGRADE = (
    "it has opset 23, and this ONNX Runtime supports 21: upgrade ONNX Runtime, or export the file with opset 21 or "
    "lower"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"[ONNXRuntimeError] : 1 : FAIL : Load model from /a/b.onnx failed:{PLACE}{OPSET}\n",
            UPGRADE,
        ),
        (
            f"[ONNXRuntimeError] : 1 : FAIL : {PLACE}Unsupported model IR version: 99, max supported IR version: 14",
            "Unsupported model IR version: 99, max supported IR version: 14",
        ),
        (
            "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load model from /a/b.onnx failed:Protobuf parsing failed.",
            "Protobuf parsing failed.",
        ),
        ("", "RuntimeError"),
    ],
)
def test_the_reason_of_an_error_comes_first(text: str, expected: str) -> None:
    assert reason(RuntimeError(text)) == expected


def versions(*, opset: int, ir_version: int) -> bytes:
    """Return a model of these two fields."""
    return bytes([8, ir_version, 8 << 3 | 2, 2, 2 << 3, opset])


def test_versions_beyond_the_oldest_supported_runtime_are_refused() -> None:
    check_versions(versions(opset=MAX_OPSET, ir_version=10))
    with pytest.raises(
        GraphRefused, match=r"it has opset 23, and the oldest .* 1\.20, supports 21: export it with"
    ):
        check_versions(versions(opset=23, ir_version=10))
    with pytest.raises(GraphRefused, match="it has IR version 11"):
        check_versions(versions(opset=18, ir_version=11))


def test_the_oldest_supported_runtime_is_the_package_s() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["cpu"] == [f"onnxruntime>={OLDEST_RUNTIME}"]
