"""Log events as one line each: a message, then key=value pairs."""

import contextlib
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime

_EVENT = "protofleet_event"
"""Attribute of a record: the event's message and fields."""


Observer = Callable[[object], None]

_OBSERVER: ContextVar[Observer | None] = ContextVar("observer of notices", default=None)


def event(logger: logging.Logger, level: int, message: str, **fields: object) -> None:
    """Log `message key=value ...`, formatted only if the logger is enabled for the level.

    The message is constant: the same event has the same words everywhere. A field whose value is None is omitted.
    """
    if logger.isEnabledFor(level):
        _write(logger, level, message, fields)


def notify(notice: object) -> None:
    """Pass a typed event to the program in which this one is embedded, if it is."""
    if (observe := _OBSERVER.get()) is not None:
        observe(notice)


def observer() -> Observer | None:
    """Return the observer of this thread's notices."""
    return _OBSERVER.get()


@contextlib.contextmanager
def observed(by: Observer | None) -> Iterator[None]:
    """Pass notices of the body, and of threads that `protocol.threads.start_thread` starts there, to an observer.

    The observer gets them from any of these threads; it must not raise.
    """
    before = _OBSERVER.set(by)
    try:
        yield
    finally:
        _OBSERVER.reset(before)


def _write(logger: logging.Logger, level: int, message: str, fields: Mapping[str, object]) -> None:
    given = {name: value for name, value in fields.items() if value is not None}
    pairs = [f"{name}={_text(value)}" for name, value in given.items()]
    extra = {_EVENT: (message, given)}
    logger.log(level, "%s", " ".join([message, *pairs]), stacklevel=3, extra=extra)


def fields_of(record: logging.LogRecord) -> tuple[str, dict[str, str | float] | None]:
    """Return the message of a record, and the fields if it is an event."""
    message, fields = getattr(record, _EVENT, None) or (record.getMessage(), None)
    return message, None if fields is None else {name: _value(value) for name, value in fields.items()}


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: `time`, `level`, `logger`, `message`, and the event's fields.

    `time` is that of ISO 8601 in UTC; a field's value is a number, true, false or a text. An exception is `traceback`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a record in ASCII."""
        message, fields = fields_of(record)
        line: dict[str, str | float] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        line |= {name: value for name, value in (fields or {}).items() if name not in line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _value(value: object) -> str | float:
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return value.hex() if isinstance(value, bytes) else str(value)


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
