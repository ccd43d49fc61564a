"""Log events: one line of a message and key=value pairs."""

import logging
import threading
import warnings

import pytest

from protocol.log import Event, event, observed, warnings_suppressed
from protocol.threads import start_thread

log = logging.getLogger("protocol.test_log")


class Unprintable:
    def __str__(self) -> str:
        raise AssertionError("formatted although nothing logs it")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (27, "27"),
        (0.1234567, "0.1235"),
        (1234567.0, "1234567"),
        (2e-9, "2e-09"),
        (3.0, "3"),
        (True, "True"),
        ("press-7", "press-7"),
        ("", '""'),
        ("two words", '"two words"'),
        ('say "x"', '"say \\"x\\""'),
        ("a=b", '"a=b"'),
        ("line\nbreak", '"line\\nbreak"'),
        (b"\x01\xff", "01ff"),
        ("a\udcff.png", r"a\udcff.png"),
        (("a", "b"), "\"('a', 'b')\""),
    ],
)
def test_event_formats_values(value: object, text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=log.name):
        event(log, logging.INFO, "head installed", value=value)
    assert caplog.messages == [f"head installed value={text}"]


def test_event_keeps_order_and_omits_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=log.name):
        event(log, logging.WARNING, "100 % done", zebra=1, reason=None, apple=2)
    (record,) = caplog.records
    assert record.getMessage() == "100 % done zebra=1 apple=2"
    assert record.levelno == logging.WARNING
    assert record.filename == "test_log.py", "the record names the caller, not the helper"


def test_event_formats_nothing_below_level(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=log.name):
        event(log, logging.DEBUG, "frame received", frame=Unprintable())
    assert caplog.messages == []


def test_warnings_are_suppressed_until_the_block_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Errors are logged; after the block, also one that raises, warnings are reported again."""

    def fail() -> None:
        with warnings_suppressed():
            log.warning("suppressed")
            log.error("logged")
            warnings.warn("suppressed", stacklevel=1)
            raise ValueError("export failed")

    with caplog.at_level(logging.INFO, logger=log.name), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="export failed"):
            fail()
        log.warning("logged after the block")
        warnings.warn("reported after the block", stacklevel=1)
    assert caplog.messages == ["logged", "logged after the block"]
    assert [str(warning.message) for warning in caught] == ["reported after the block"]


def test_observer_gets_events_of_the_body_and_of_its_threads() -> None:
    """Whatever is logged; other threads' events, debug events and those after the body are not observed."""
    seen: list[Event] = []
    quiet = logging.getLogger("protocol.test_log.quiet")
    quiet.setLevel(logging.CRITICAL)

    def report(device: str) -> None:
        event(quiet, logging.DEBUG, "frame received", device=device)
        event(quiet, logging.INFO, "head in use", device=device, round=None)

    with observed(seen.append):
        report("body")
        start_thread(lambda: report("thread"), name="inside", on_failure=lambda _: None).join()
        outside = threading.Thread(target=report, args=["outside"])
        outside.start()
        outside.join()
    report("after")
    assert seen == [Event("head in use", logging.INFO, {"device": name}) for name in ("body", "thread")]
