"""What can go wrong, as types. Every message says what was wrong, where, and what is allowed."""

from __future__ import annotations


class OctavoError(Exception):
    """Base of every error Octavo raises on purpose."""


class InvalidParameterError(OctavoError, ValueError):
    """A parameter of a request or of a constructor is out of its range."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        try:
            shown = repr(value)
        except ValueError:  # an integer of too many digits to print
            shown = f"<{type(value).__name__} that is too long to show>"
        if len(shown) > 100:
            shown = shown[:97] + "..."
        super().__init__(f"{field}={shown} is not allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class ModelNotFoundError(OctavoError):
    """No such model: neither a known name, a local path nor a repository that could be reached."""


class DownloadError(OctavoError):
    """A model could not be fetched or stored (network, disk, checksum, missing tool)."""


class ModelFileError(OctavoError, ValueError):
    """A model file is damaged, truncated or not what it claims to be."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = str(path)
        self.problem = problem


class DatasetError(OctavoError, ValueError):
    """A dataset file of a benchmark cannot be read, or an entry of it is not as it should be."""

    def __init__(self, path: object, where: str, problem: str) -> None:
        super().__init__(f"{path}: {where} {problem}")
        self.path = str(path)
        self.where = where
        self.problem = problem


class UnsupportedModelError(OctavoError, ValueError):
    """A model asks for something Octavo does not do; the message names the key and its value."""


class ChatTemplateError(OctavoError, ValueError):
    """A chat template is missing, fails, or exceeds its bounds."""


class CapacityError(OctavoError, ValueError):
    """A request can never fit: too many tokens for the context or for the KV pool."""


class QueueFullError(CapacityError):
    """The engine's queue is full now; the same request may be taken later."""


class RequestFailedError(OctavoError):
    """One request failed while it ran (for example a NaN in its logits); the others are not affected."""


class EngineClosedError(OctavoError):
    """The engine was closed, or is used in a forked child."""


class EngineUnavailableError(OctavoError):
    """The engine process is down, or not there yet; the message says why."""


class DeadlineError(OctavoError):
    """A request did not get as far as it should have by its deadline."""


class SlowReaderError(OctavoError):
    """A stream was cut off because its reader took nothing for too long."""


class FrameError(OctavoError, ValueError):
    """A message between processes is longer than allowed or malformed."""


class ConfigError(OctavoError, ValueError):
    """A setting of the server is wrong; the message names the flag, the variable or the file it came from."""

    def __init__(self, what: str, allowed: str) -> None:
        super().__init__(f"{what} is not allowed: {allowed}")


class OverloadedError(OctavoError):
    """No room for another request now; `retry_after`: in how many seconds there should be."""

    retry_after: int = 5  # where another process did not tell

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DrainingError(OctavoError):
    """The server is being shut down and takes no new requests; `retry_after`: when another may be there."""

    retry_after: int = 5  # where another process did not tell

    def __init__(self, retry_after: int) -> None:
        super().__init__("the server is shutting down and takes no new requests")
        self.retry_after = retry_after


class ProgramError(OctavoError):
    """An expression of a program failed; the message names the program's line. `error` is what went wrong there."""

    def __init__(self, file: str, line: int, expression: str, error: BaseException) -> None:
        super().__init__(f"{file}:{line}: {expression}: {error}" if expression else f"{file}:{line}: {error}")
        self.file = file
        self.line = line
        self.expression = expression
        self.error = error
        self.__cause__ = error


class BackendError(OctavoError):
    """A server that a program calls could not be reached, refused a request or answered what cannot be read."""


class UnsupportedByBackendError(OctavoError):
    """A program asks for what its backend cannot do; the message says what, and what can."""


class ProgramCancelledError(OctavoError):
    """A program was ended from outside while it ran."""
