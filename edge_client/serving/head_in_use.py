"""The newest head of a device for a program that predicts for long: opened again when another one is installed."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge_client.data.class_prior import Adjuster, Prior, Source
from edge_client.data.extraction import Refusal, feature_of
from edge_client.inference import Head, best_classes, open_adjuster, open_in_use
from edge_client.runtime.backbone import Backbone
from edge_client.runtime.session import Provider
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import InstalledHead
from protocol.errors import ProtofleetError, UnreadableImage
from protocol.log import event

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""Seconds before a head that could not be opened is tried again."""


@dataclass(frozen=True)
class OpenedHead:
    """A head with its backbones, and the prior of its images."""

    installed: InstalledHead
    backbones: Sequence[Backbone]
    head: Head
    adjuster: Adjuster

    def classify(
        self, image: Image.Image | bytes, *, top: int
    ) -> tuple[tuple[tuple[str, float], ...], Prior]:
        """Return the `top` most probable classes of an image, decoded or as a file's bytes, with their probabilities.

        Raises:
            UnreadableImage: it cannot be used.
            ProtofleetError: the backbone or the head fails on it.
        """
        rows, prior = self.adjuster.adjust(self.probabilities(image))
        return best_classes(rows[0], self.head.classes, top), prior

    def probabilities(self, image: Image.Image | bytes) -> NDArray[np.float32]:
        """Return the head's probabilities of an image, float32 (1, C); the errors are those of `classify`."""
        feature = feature_of(image, self.backbones)
        if isinstance(feature, Refusal):
            raise UnreadableImage(feature.reason)
        return self.head.probabilities(feature[None])


class HeadInUse:
    """The head in use, from any thread.

    A head is tried on a black image when it is opened. This counts as a use of it, as in `edge-client predict`: after
    three failures in a row the device returns to the head before. Later predictions do not count, since images from
    outside must not bring a head back. The prior of each head's images begins without any.
    """

    def __init__(
        self, store: DeviceState, *, provider: Provider, threads: int | None, prior: Source = "none"
    ) -> None:
        self._store = store
        self._prior: Source = prior
        self._open = partial(open_in_use, store, provider=provider, threads=threads)
        self._lock = threading.Lock()
        self._opened: OpenedHead | None = None
        self._problem: ProtofleetError | None = None
        self._tried: InstalledHead | None = None
        self._retry_s = 0.0

    def follow(self) -> OpenedHead:
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
                raise self._problem or ProtofleetError("no head is installed")
            return self._opened

    def _renew(self) -> None:
        try:
            installed, backbones, head = self._open()
            opened = OpenedHead(installed, backbones, head, open_adjuster(self._store, head, self._prior))
            with self._store.run_head(opened.installed):
                opened.probabilities(Image.new("RGB", (64, 64)))
        except ProtofleetError as error:
            self._problem = error
            event(log, logging.ERROR, "head not used", reason=str(error))
            return
        self._opened = opened
        for note in {each.model.note: None for each in opened.backbones if each.model.note}:
            event(log, logging.WARNING, note)
        used = opened.installed
        event(log, logging.INFO, "head opened", version=used.version, round=used.round)
