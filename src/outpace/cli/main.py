"""``outpace``: the commands, and how errors reach a person."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Annotated, Any

import typer

from outpace.cli import bench, cache, chat, datastore, doctor, explain, generate, plan, trace, tune, verify
from outpace.cli.command import Interrupted, ReaderLeft
from outpace.cli.options import spell
from outpace.errors import OutpaceError

# The base of typer's usage errors, wherever this version of typer keeps its click.
_ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

_INTERRUPTED = 130

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


for command in (generate, bench, chat, verify, trace, explain, plan, datastore, tune, cache, doctor):
    command.register(app)


def main() -> None:
    """Entry point. Exit code 2 for what the user can mend, 130 for Ctrl-C, 1 for a difference that was found.

    70 is a fault of Outpace itself.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    code = _run("--debug" in sys.argv)
    if code == _INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C changes nothing any more
    sys.exit(code)


def _run(debug: bool) -> int:
    try:
        return int(app(standalone_mode=False) or 0)
    except (Interrupted, KeyboardInterrupt, typer.Abort) as error:
        return _fail(str(error) or "interrupted", _INTERRUPTED)
    except ReaderLeft:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # else the interpreter flushes into the pipe at exit
        return 0
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OutpaceError):
            return _fail(error.told(spell), 2)
        if isinstance(error, _ClickException):
            message = error.format_message()
            return _fail(f"{message} (see --help)", 2) if message else 2
        if isinstance(error, MemoryError):
            return _fail("out of memory: use a smaller model, --kv-memory, or --dtype bfloat16", 2)
        if isinstance(error, OSError):
            return _fail(f"{error}: check the file, its permissions and the disk", 2)
        return _fail(f"internal error, {type(error).__name__}: {error}: please report what --debug shows", 70)


def _fail(message: str, code: int) -> int:
    print(f"outpace: {' '.join(message.split())}", file=sys.stderr)
    return code
