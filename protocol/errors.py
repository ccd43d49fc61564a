"""The exceptions of this project. Each message says what was expected, what came, and what to do."""

from protocol import __version__


def pip_command(extras: str) -> str:
    """Return the command that installs the wheel with extras, for an error: protofleet is on no package index."""
    return f"pip install 'protofleet-{__version__}-py3-none-any.whl[{extras}]'"


class ProtofleetError(Exception):
    """An expected failure, shown as one line."""


class ConfigError(ProtofleetError):
    """A setting, task file or image folder that cannot be used."""


class JoinRefused(ConfigError):
    """A device that cannot join with its link; `reason` is for its page, which has sentences of its own."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class MalformedMessage(ProtofleetError):
    """Received bytes that are not a message of this protocol."""


class VersionMismatch(MalformedMessage):
    """A message of another protocol version."""


class BadSignature(ProtofleetError):
    """Received bytes without a valid signature."""


class TransferError(ProtofleetError):
    """A transfer whose bytes contradict each other, its size or its digest."""


class BackboneMismatch(ProtofleetError):
    """A backbone or head other than the one that the task names."""


class GraphRefused(ProtofleetError):
    """A received ONNX graph that is not executed, or tensors that do not fit it."""


class CrashedBefore(GraphRefused):
    """A graph that is not executed because it has ended jobs before."""


class UnreadableImage(ProtofleetError):
    """An image that cannot be decoded."""


class PrivacyRefused(ProtofleetError):
    """An upload that would violate the privacy settings of the task or the device."""


class PrivacyFailed(PrivacyRefused):
    """An upload that could not be made private, for a reason that may pass, such as a full disk."""


class RuntimeMissing(ProtofleetError):
    """A required package is not installed."""


class ThreadFailed(ProtofleetError):
    """A thread that the program depends on could not be started, or has ended: the program ends."""


class StateError(ProtofleetError):
    """The state directory cannot be read or written."""


class StateRefused(StateError):
    """A state directory of another version of protofleet, or a path that can be none: no repetition helps."""


class StateLocked(StateError):
    """A state directory that another program has locked."""


class NoStateError(StateError):
    """A database in which no aggregator has made tables yet."""


class BlobLost(StateError):
    """A blob that is missing or was damaged on disk, by its digest; it can be downloaded or made again."""

    def __init__(self, digest: bytes, text: str) -> None:
        super().__init__(text)
        self.digest = digest

    def __reduce__(self) -> tuple[type, tuple[bytes, str]]:
        return type(self), (self.digest, str(self))


_NO_THREAD = ("can't start new thread", "unable to start watchdog thread")
"""Messages of the RuntimeErrors of `threading` and `faulthandler`."""


def problem_of_system(error: BaseException) -> str:
    """Return what the operating system refused, in one line; empty if the error is the program's own."""
    if isinstance(error, MemoryError):
        return "out of memory: stop other programs, or raise the limit of this one"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot use {error.filename or 'a file or connection'}: {error.strerror}"
    if isinstance(error, ImportError) and error.path is not None:
        return f"cannot load {error.path}: {error}"
    if isinstance(error, RuntimeError) and str(error) in _NO_THREAD:
        return "cannot start a thread: raise the number of threads or the memory that the system allows"
    return ""
