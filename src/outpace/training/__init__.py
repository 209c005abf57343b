"""Data and training of learned drafters. Needs the packages of ``outpace[train]``; running a drafter does not."""

from importlib.util import find_spec

from outpace.errors import MissingExtraError


def need(package: str) -> None:
    """Raise MissingExtraError where ``package`` is not installed."""
    if find_spec(package) is None:
        raise MissingExtraError(f"training needs {package}, which is not installed: pip install 'outpace[train]'")
