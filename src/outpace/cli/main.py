"""``outpace``: the commands, and how errors reach a person."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from outpace.cli import bench, chat, doctor, generate, verify
from outpace.errors import OutpaceError

# The base of typer's usage errors, wherever this version of typer keeps its click.
_ClickException = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

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


for command in (generate, bench, chat, verify, doctor):
    command.register(app)


def main() -> None:
    """Entry point. Exit code 2 for what the user can mend, 130 for Ctrl-C, 1 for a difference that was found."""
    try:
        code = app(standalone_mode=False)
    except (OutpaceError, _ClickException) as error:
        if "--debug" in sys.argv:
            raise
        message = str(error) if isinstance(error, OutpaceError) else error.format_message()
        hint = "" if isinstance(error, OutpaceError) else " (see --help)"
        print(f"outpace: {' '.join(message.split())}{hint}", file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        print("outpace: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        code = 0
    sys.exit(code)
