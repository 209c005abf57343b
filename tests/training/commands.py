"""Commands that train, run in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from outpace.cli.app import app


def outpace(*arguments: object) -> str:
    """What a command prints; what it raises."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False, standalone_mode=False)
    return result.stdout
