"""Data and training of learned drafters. Needs the packages of ``outpace[train]``; running a drafter does not."""

from outpace.common.installing import install
from outpace.errors import MissingExtraError


def missing(error: ModuleNotFoundError) -> MissingExtraError:
    """The remedy for a package that is not installed."""
    return MissingExtraError(f"training needs {error.name}, which is not installed: {install('outpace[train]')}")
