"""``outpace``: what runs a command, and how errors reach a person."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys

from outpace.cli import plainly
from outpace.cli.command import Interrupted, ReaderLeft, UsageError
from outpace.errors import OutpaceError

_INTERRUPTED = 130
_LITTER = 150_000  # objects between two looks for garbage; loading makes many (a vocabulary's merges), and drops few


def main() -> None:
    """Entry point. Exit code 2 for what the user can mend, 130 for Ctrl-C, 1 for a difference that was found.

    70 is a fault of Outpace itself.
    """
    gc.set_threshold(_LITTER)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    code = _run("--debug" in sys.argv)
    if code == _INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C changes nothing any more
    sys.exit(code)


def _run(debug: bool) -> int:
    try:
        command = plainly.command(sys.argv[1:])
        if command is None:
            from outpace.cli import app

            command = app.run
        return int(command() or 0)
    except (Interrupted, KeyboardInterrupt) as error:
        return _fail(str(error) or "interrupted", _INTERRUPTED)
    except ReaderLeft:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # else the interpreter flushes into the pipe at exit
        return 0
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OutpaceError):
            from outpace.cli.options import spell

            return _fail(error.told(spell), 2)
        if isinstance(error, UsageError):
            return _fail(f"{error} (see --help)", 2) if str(error) else 2
        if isinstance(error, MemoryError):
            return _fail("out of memory: use a smaller model, --kv-memory, or --dtype bfloat16", 2)
        if isinstance(error, OSError):
            return _fail(f"{error}: check the file, its permissions and the disk", 2)
        return _fail(f"internal error, {type(error).__name__}: {error}: please report what --debug shows", 70)


def _fail(message: str, code: int) -> int:
    print(f"outpace: {' '.join(message.split())}", file=sys.stderr)
    return code
