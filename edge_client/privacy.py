"""What a device lets no task talk it into, pure: it looks for itself at what a task says of privacy."""

from protocol.errors import PrivacyRefused
from protocol.messages import TaskManifest

UPLOADS_MORE = "the task wants prototypes perturbed, and hands in parameters beside them that are not"


def check_task(manifest: TaskManifest) -> None:
    """See that what a task promises of privacy can be kept.

    Raises:
        PrivacyRefused: it cannot; the text says nothing of any picture.
    """
    how, program = manifest.perturbation, manifest.program
    if how is not None and how.on == "prototypes" and program is not None and program.uploaded:
        raise PrivacyRefused(UPLOADS_MORE)
