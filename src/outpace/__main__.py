"""``outpace``, and ``python -m outpace``."""

import sys


def main() -> None:
    """The command line. What cannot even be imported (an extension of another version) is told in one line, too."""
    from outpace.errors import OutpaceError

    try:
        from outpace.cli.main import main as run
    except OutpaceError as error:
        print(f"outpace: {error}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
