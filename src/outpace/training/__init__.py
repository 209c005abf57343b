"""Data and training of learned drafters. Needs the packages of ``outpace[train]``; running a drafter does not."""

from collections.abc import Iterator
from contextlib import contextmanager

from outpace.common.installing import install
from outpace.errors import MissingExtraError


@contextmanager
def packages() -> Iterator[None]:
    """Raises MissingExtraError with the remedy where an import in the block finds a package not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"training needs {error.name}, which is not installed: {install('outpace[train]')}"
        ) from error
