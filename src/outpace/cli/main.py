"""``outpace``: what runs a command, and how errors reach a person."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from outpace.cli.command import Interrupted, UsageError
from outpace.errors import OutpaceError

_INTERRUPTED = 130
_LITTER = 150_000  # objects between two looks for garbage; loading makes many (a vocabulary's merges), and drops few


def main() -> None:
    """Entry point. Exit code 2 for what the user can mend, 130 for Ctrl-C, 1 for a difference that was found.

    70 is a fault of Outpace itself.
    """
    gc.set_threshold(_LITTER)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by 2>&-
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (until the process ends)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # some locales let through what is no text
    code = _run("--debug" in sys.argv)
    if code == _INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C changes nothing any more
    sys.exit(code)


def _run(debug: bool) -> int:
    try:
        return _command()()
    except (Interrupted, KeyboardInterrupt) as error:
        return _fail(str(error) or "interrupted", _INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone, as head does; the interpreter would flush into the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OutpaceError):
            return _fail(_spelled(error), 2)
        if isinstance(error, UsageError):
            return _fail(f"{error} (see --help)", 2) if str(error) else 2
        if isinstance(error, MemoryError):
            return _fail("out of memory: use a smaller model, --kv-memory, or --dtype bfloat16", 2)
        if isinstance(error, OSError):
            return _fail(f"{error}: check the file, its permissions and the disk", 2)
        return _fail(f"internal error, {type(error).__name__}: {error}: please report what --debug shows", 70)


def _spelled(error: OutpaceError) -> str:
    from outpace.cli.app import chosen

    try:
        return error.spelled(chosen(sys.argv[1:]).spell)
    except OutpaceError:  # this very error: the command's module could not be imported
        return str(error)


def _command() -> Callable[[], int]:
    from outpace.cli.app import parse

    if sys.argv[1:2] in (["generate"], ["chat"], ["serve"]):  # a person waits for these
        _import_numpy()
    return parse(sys.argv[1:])


def _import_numpy() -> None:
    """Import numpy without the threads that its BLAS would start: nothing here multiplies there."""
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:
        return
    os.environ[name] = "1"
    try:
        import_module("numpy")
    finally:
        del os.environ[name]  # others that we start may need theirs


def _fail(message: str, code: int) -> int:
    with suppress(OSError):  # the exit code says it, too
        print(f"outpace: {' '.join(message.split())}", file=sys.stderr)
    return code
