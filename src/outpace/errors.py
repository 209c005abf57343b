"""Errors a user can meet. Each message names the value that is wrong and the remedy."""


class OutpaceError(Exception):
    """Base of every error that Outpace raises on purpose."""


class ParameterError(OutpaceError, ValueError):
    """A parameter, option or prompt is out of range or cannot be honoured."""


class ModelError(OutpaceError):
    """A model cannot be found, read, or served exactly."""


class DrafterError(OutpaceError, ValueError):
    """A drafter spec is malformed, or the drafter does not fit the target."""


class MemoryLimitError(OutpaceError):
    """A request can never fit into the KV memory it was given."""


class NoTokenAllowedError(OutpaceError):
    """The logit rules of a request forbid every token, so nothing can be chosen."""
