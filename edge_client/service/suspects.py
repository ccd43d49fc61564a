"""The blame for a job's process that has ended by itself: on graphs or a head, or on an image."""

from edge_client.store.culprit_record import CulpritRecord
from edge_client.store.job_folder import At


class Suspects:
    """The images that were being decoded when jobs ended: the next job decodes each of them by itself."""

    def __init__(self, culprits: CulpritRecord) -> None:
        self._culprits = culprits
        self._images: set[bytes] = set()

    @property
    def images(self) -> tuple[bytes, ...]:
        """Identities of the images."""
        return tuple(self._images)

    def blame(self, at: At) -> None:
        """Note what a job ran when its process ended."""
        if len(at.decoding) == 1 and at.decoding[0] in self._images:
            self._images.discard(at.decoding[0])
            self._culprits.convict(at.decoding[0], memory_bytes=at.memory_bytes)
            return  # the graphs that are named, too, did not run
        self._images.update(at.decoding)
        if at.what:
            self._culprits.add_death(at.what)

    def clear_image(self, image: bytes) -> None:
        """Trust an image that was decoded."""
        self._images.discard(image)

    def clear(self) -> None:
        """Forget the images that are left after a build: they are gone."""
        self._images.clear()
