"""Values that the programs beside the service store: each in a file of its own, since only the service writes SQLite.

The files are in the folder `apps` of the state folder. One that cannot be read, or has other contents than expected, is
logged and taken for none.
"""

import errno
import logging
from functools import cache
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from protocol.log import event
from protocol.storage.blobstore import write_atomically
from protocol.wire.messages import Figure

log = logging.getLogger(__name__)

Value = TypeVar("Value", bound=msgspec.Struct)

FOLDER = "apps"

MAX_BYTES = 2**27
"""Of a file."""

DRIFT_AGE_S = 7 * 86400.0
"""Seconds after which a comparison says nothing of today's images: a full window takes a day of `watch`, or less."""


class Drift(msgspec.Struct, frozen=True):
    """The newest comparison of predicted images with the labeled ones (`apps.drift`)."""

    score: Figure = 0.0
    """Standard deviations of chance."""
    images: Annotated[int, Meta(ge=0)] = 0
    """Predicted images that were compared; 0 before the first comparison."""
    tested_s: float = 0.0
    """Unix time."""

    def newest(self, *, now_s: float) -> float | None:
        """Return the score; None without a comparison in the last DRIFT_AGE_S, such as after the end of `watch`."""
        return self.score if self.images and now_s < self.tested_s + DRIFT_AGE_S else None


MOST_KEPT = 20_000
"""Images in `Kept`."""


class Kept(msgspec.Struct, frozen=True):
    """Images that a person has kept where they are in the review; one that is moved or changed is another one."""

    images: tuple[str, ...] = ()
    """Their identities, the newest last."""

    def __add__(self, image: str) -> "Kept":
        """Return them with another one, without the oldest beyond MOST_KEPT."""
        return Kept((*(each for each in self.images if each != image), image)[-MOST_KEPT:])


def read_value(state: Path, kind: type[Value]) -> Value:
    """Return the stored value of a type, or its default."""
    value = read_file(_path(state, kind), kind)
    return kind() if value is None else value


def write_value(state: Path, value: msgspec.Struct) -> None:
    """Store a value durably in place of the one of its type; raises StateError."""
    write_file(_path(state, type(value)), value)


def read_file(path: Path, kind: Any) -> Any:
    """Return the JSON value of a file as the type `kind`; None without the file, and if it is malformed."""
    try:
        if not S_ISREG(path.stat().st_mode):  # to open a pipe would block
            raise OSError(errno.EINVAL, "not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise msgspec.DecodeError(f"more than {MAX_BYTES} bytes")
        return msgspec.json.decode(data, type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _warn(path, str(error))
        return None


def write_file(path: Path, value: Any) -> None:
    """Replace a file by a JSON value, durably; raises StateError."""
    write_atomically(path, msgspec.json.encode(value))


def _path(state: Path, kind: type[msgspec.Struct]) -> Path:
    return state / FOLDER / f"{kind.__name__.lower()}.json"


@cache
def _warn(path: Path, reason: str) -> None:
    """Log once: the service reads the files again and again."""
    event(log, logging.WARNING, "malformed file not used", file=path, reason=reason)
