"""Images decoded in a process each, with the same budget of time: no image delays a private build without a bound.

A decoder can take minutes for a small file, such as a JPEG of a thousand scans, and nothing interrupts it in a thread.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from edge_client.graphs.forked_runs import ForkedRuns, packed, serve, unpacked
from edge_client.images.decoding import decoded
from edge_client.images.extraction import Digests, Pixels, Refusal, pixels_of
from edge_client.images.images import LabeledImage
from protocol.models.preprocessing import Preprocessing, preprocess

SAMPLE = (1000, 2000, 3)
"""Random pixels of a JPEG: decoding may take ten times as long, about what 40 megapixels of a photograph take."""

TOO_SLOW = (
    "decoding takes more than {budget_s:.2g} s of the processor, or {slot_s:.2g} s by the clock: save it with fewer "
    "pixels, or as a JPEG that is not progressive"
)


class IsolatedDecoder(ForkedRuns):
    """Decodes images for a backbone's preprocessing."""

    def __init__(self, spec: Preprocessing) -> None:
        super().__init__(__name__, spec)
        self._spec = spec

    def pixels_of(
        self, image: LabeledImage, _specs: Iterable[Preprocessing], _alter: object, digests: Digests | None
    ) -> Pixels | Refusal:
        """Return what `extraction.pixels_of` does; an image that takes more than the budget is unusable.

        Raises:
            StateError: the program that forks has ended, which is no fault of the image.
        """
        try:
            described, *pixels = unpacked(self.answer(image))
        except TimeoutError:
            return Refusal(TOO_SLOW.format(budget_s=self._budget_s, slot_s=self.slot_s))
        except RuntimeError:
            return Refusal("its decoder crashes: save it anew")
        found = json.loads(str(described))
        if digests is not None and found["digest"]:
            digests[image.identity] = bytes.fromhex(found["digest"])
        return {self._spec: pixels[0]} if pixels else Refusal(found["reason"], may_pass=found["may_pass"])


@contextlib.contextmanager
def isolated_decoder(spec: Preprocessing) -> Iterator[IsolatedDecoder]:
    """Yield a decoder with a budget, ten times the time of a sample.

    Raises:
        StateError: its program cannot be started.
    """
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, SAMPLE, np.uint8)
    Image.fromarray(noise).save(file, "JPEG", quality=95)
    with contextlib.closing(IsolatedDecoder(spec)) as decoder:
        decoder.start()
        decoder.set_budget(file.getvalue())
        yield decoder


def _load(spec: Preprocessing) -> Callable[[Any], bytes]:
    Image.init()  # imports what each fork would import again

    def answer(request: LabeledImage | bytes) -> bytes:
        if isinstance(request, bytes):
            with decoded(request) as opened:
                return packed([preprocess(opened, spec)])
        digests: Digests = {}
        made = pixels_of(request, [spec], None, digests)
        refusal = made if isinstance(made, Refusal) else Refusal("")
        found = {"digest": digests.get(request.identity, b"").hex(), "reason": refusal.reason}
        described = np.array(json.dumps({**found, "may_pass": refusal.may_pass}))
        return packed([described, *(() if isinstance(made, Refusal) else made.values())])

    return answer


if __name__ == "__main__":
    serve(int(sys.argv[1]), _load)
