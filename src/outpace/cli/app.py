"""The commands, as typer has them: parsing in full, help, and what is wrong with a command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from outpace.cli import (
    bench,
    cache,
    chat,
    datastore,
    doctor,
    explain,
    export,
    generate,
    plan,
    serve,
    trace,
    train,
    tune,
    verify,
)
from outpace.cli.command import Interrupted, UsageError

# The base of typer's usage errors, wherever this version of typer keeps its click.
ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name="outpace",
    help="Speculative decoding of language models: the same tokens, sooner.",
    epilog="Example: outpace generate 'Why is the sky blue?' --compare",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from outpace import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for command in (
    generate,
    bench,
    chat,
    serve,
    verify,
    trace,
    explain,
    plan,
    datastore,
    train,
    export,
    tune,
    cache,
    doctor,
):
    command.register(app)


def run() -> Any:
    """What ``sys.argv`` asks for; its exit code. Raises UsageError, Interrupted and whatever a command raises."""
    try:
        return app(standalone_mode=False)
    except typer.Abort as error:
        raise Interrupted(str(error) or "interrupted") from error
    except ClickException as error:
        raise UsageError(error.format_message()) from error
