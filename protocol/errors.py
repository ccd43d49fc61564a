"""The exceptions of this project: each message says what was expected, what came, and what to do."""


class ProtofleetError(Exception):
    """An expected failure, shown as one line."""


class ConfigError(ProtofleetError):
    """A setting, task file or image folder that cannot be used."""


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


class UnreadableImage(ProtofleetError):
    """An image that cannot be decoded."""


class PrivacyRefused(ProtofleetError):
    """An upload that would violate the privacy settings of the task or the device."""


class RuntimeMissing(ProtofleetError):
    """A required package is not installed."""


class ThreadFailed(ProtofleetError):
    """A thread that the program depends on could not be started, or has ended: the program ends."""


class StateError(ProtofleetError):
    """The state directory cannot be read or written."""
