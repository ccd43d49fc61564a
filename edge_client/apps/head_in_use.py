"""Keeps the installed head open in a long-running program, and opens it again when it changes."""

import logging
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from edge_client.apps.drift import DriftMonitor
from edge_client.heads.classifier import Classifier, open_classifier
from edge_client.store.device_state import DeviceState
from protocol.errors import ProtofleetError
from protocol.log import event

if TYPE_CHECKING:
    from edge_client.store.stored_values import InstalledHead

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""Seconds before a head that could not be opened is tried again."""


class HeadInUse:
    """The head in use, from any thread.

    A backbone that the next head needs, too, stays open. A head is tried on a black image when it is opened, and no
    later failure counts, since images from outside must not bring a head back. The prior of each head's images begins
    without any.
    """

    def __init__(self, store: DeviceState, **options: Any) -> None:
        """Follow the head in use; `options` are those of `open_classifier`."""
        self._store = store
        self._open = partial(open_classifier, store, **options)
        self._lock = threading.Lock()
        self._opened: Classifier | None = None
        self._problem = ProtofleetError()
        self._tried: InstalledHead | None = None
        self._retry_s = 0.0

    def follow(self) -> Classifier:
        """Return the head in use, opened if it is another one than at the last call.

        If it cannot be opened, the head before is returned, and this one tried again after RETRY_S.

        Raises:
            ProtofleetError: there is no head that can be used.
        """
        with self._lock:
            installed = self._store.heads_in_use().installed
            if self._opened is not None and installed == self._opened.installed:
                return self._opened
            if installed != self._tried or time.monotonic() >= self._retry_s:
                self._tried, self._retry_s = installed, time.monotonic() + RETRY_S
                self._renew()
            if self._opened is None:
                raise self._problem
            return self._opened

    def _renew(self) -> None:
        try:
            opened = self._open(opened=self._opened.backbones if self._opened else ())
        except ProtofleetError as error:
            before, self._problem = self._problem, error
            if str(error) == str(before):
                return
            if self._tried is None:
                event(log, logging.INFO, "waiting for the first head", state=self._store.folder)
            else:
                event(log, logging.ERROR, "head not used", reason=str(error))
            return
        self._problem = ProtofleetError()
        monitor = DriftMonitor(
            self._store.folder, opened.head, tuple(each.sha256 for each in opened.backbones)
        )
        self._opened = replace(opened, observe=monitor.observe)
        for note in opened.notes:
            event(log, logging.WARNING, note)
        used = opened.installed
        event(log, logging.INFO, "head opened", version=used.version, round=used.round)
