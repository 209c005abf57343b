"""``python -m benchmarks NAME ...`` runs a benchmark; ``NAME --help`` has its options, ``--help`` lists them all.

A benchmark is a module with ``arguments(parser)``, which adds its options, and ``run(given)``, which returns the exit
code: 0, or 1 where a promise was broken. 2 is bad input, 130 Ctrl-C, which SIGTERM counts as, so that servers end.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.figures import STANDARD_OUTPUT
from outpace.errors import OutpaceError

HERE = Path(__file__).parent
SHARED = ("figures", "servers", "soak_server", "__main__")  # no benchmarks


def names() -> list[str]:
    return [found.name for found in pkgutil.iter_modules([str(HERE)]) if found.name not in SHARED]


def about(name: str) -> str:
    """The first line of a benchmark's docstring; nothing is imported."""
    path = HERE / name / "__init__.py" if (HERE / name).is_dir() else HERE / f"{name}.py"
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]


def parse(name: str, arguments: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """A benchmark, and its options from a command line; leaves as argparse does where they are not its own."""
    module = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.arguments(parser)
    return module, parser.parse_args(arguments)


def call(name: str, arguments: Sequence[str]) -> int:
    """Run a benchmark with a command line."""
    module, given = parse(name, arguments)
    given.standard_output = sys.stdout
    alone = getattr(given, "json", None) == STANDARD_OUTPUT  # for JSON: text goes to standard error
    try:
        with contextlib.redirect_stdout(sys.stderr if alone else sys.stdout):
            code: int = module.run(given)
    except (OutpaceError, OSError, subprocess.CalledProcessError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted: what was measured until then is kept", file=sys.stderr)
        return 130
    return code


def main() -> int:
    known = names()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: python -m benchmarks NAME ...\n")
        print("\n".join(f"  {each:<11} {about(each)}" for each in known))
        return 0 if len(sys.argv) > 1 else 2
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        print(f"there is no benchmark {name}: {f'did you mean {close[0]}?' if close else '--help lists them'}")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    return call(name, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
