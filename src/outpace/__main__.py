"""``python -m outpace``."""

from outpace.cli.main import main

if __name__ == "__main__":
    main()
