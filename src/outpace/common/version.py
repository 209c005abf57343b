"""The version of this package, in one place: pyproject.toml and scripts/release read it here."""

__version__ = "0.1.0"
