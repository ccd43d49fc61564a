"""An ONNX model's file, and the arrays that it takes and gives."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protocol.errors import GraphRefused

_DTYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


@dataclass(frozen=True)
class Slot:
    """Dtype and shape of an input or output; an axis that is None may have any length."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join('any' if edge is None else str(edge) for edge in self.shape)})"


def describe(slots: Mapping[str, Slot]) -> str:
    """Return names, dtypes and shapes in one line."""
    return ", ".join(f"{name} {slot}" for name, slot in slots.items())


def mapped(path: Path) -> memoryview:
    """Return a file's bytes, mapped into memory; raises GraphRefused if it is no regular file, or empty."""
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for its writer
            raise GraphRefused(f"{path} is not a regular file")
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise GraphRefused(str(error)) from error


def slots_of(values: list[Any]) -> dict[str, Slot]:
    """Return the inputs or outputs of a session of ONNX Runtime; raises GraphRefused for other dtypes."""
    for value in values:
        if value.type not in _DTYPES:
            raise GraphRefused(f"{value.name} is of {value.type}; expected one of {', '.join(_DTYPES)}")
    return {
        value.name: Slot(
            np.dtype(_DTYPES[value.type]),
            tuple(edge if isinstance(edge, int) else None for edge in value.shape),
        )
        for value in values
    }
