"""The one tree of errors: each says what was expected, what came, and what to do."""


class ProtofleetError(Exception):
    """An expected failure, told to a person as one line."""


class ConfigError(ProtofleetError):
    """A setting, a task file or a folder of images that cannot be used as it is."""


class MalformedMessage(ProtofleetError):
    """Bytes from outside that are not a message of this protocol."""


class VersionMismatch(MalformedMessage):
    """A message of another protocol version."""


class BadSignature(ProtofleetError):
    """Bytes that are not signed by whom they have to be from."""


class TransferError(ProtofleetError):
    """A transfer whose bytes contradict themselves, their bounds or their digest."""


class BackboneMismatch(ProtofleetError):
    """A backbone or head that is not the one the task names."""


class GraphRefused(ProtofleetError):
    """A graph from outside that is not run, or tensors that do not fit it."""


class UnreadableImage(ProtofleetError):
    """An image that cannot be decoded."""


class PrivacyRefused(ProtofleetError):
    """Something that would have left a device with less protection than its task or its owner wants."""


class RuntimeMissing(ProtofleetError):
    """A program was started without the packages it runs on."""


class StateError(ProtofleetError):
    """The state directory cannot be read or written."""
