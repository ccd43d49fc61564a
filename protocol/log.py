"""Log events as one line each: a message, then key=value pairs."""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator


def event(logger: logging.Logger, level: int, message: str, **fields: object) -> None:
    """Log `message key=value ...`, formatted only if the logger is enabled for the level.

    The message is constant: the same event has the same words everywhere. A field whose value is None is omitted.
    """
    if logger.isEnabledFor(level):
        pairs = [f"{name}={_text(value)}" for name, value in fields.items() if value is not None]
        logger.log(level, "%s", " ".join([message, *pairs]), stacklevel=2)


@contextlib.contextmanager
def warnings_suppressed() -> Iterator[None]:
    """Suppress Python's warnings, and log messages up to level WARNING, of a library in this process."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _text(value: object) -> str:
    """Return floats with four significant digits, bytes in hex, and texts in quotes where they would be ambiguous.

    Names of files outside UTF-8 are escaped: not every log can take them.
    """
    if isinstance(value, float):
        text = f"{value:.4g}"
        return f"{value:.0f}" if "e+" in text else text
    text = value.hex() if isinstance(value, bytes) else str(value).encode(errors="backslashreplace").decode()
    if text and not any(character.isspace() or character in "\"'=" for character in text):
        return text
    return json.dumps(text, ensure_ascii=False)
