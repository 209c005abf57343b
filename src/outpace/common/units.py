"""Amounts as people write them."""

from __future__ import annotations

import time

from outpace.errors import ParameterError


def parse_bytes(text: str | int) -> int:
    """``"2GiB"``, ``"512MB"``, ``4096`` -> bytes. Raises ParameterError."""
    if not isinstance(text, str):
        return text  # whoever takes a number of bytes checks it
    units = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
    number = text.strip().lower()
    unit = number.lstrip("0123456789. ")
    try:
        return int(float(number[: len(number) - len(unit)]) * units[unit.removesuffix("b") if unit != "b" else "b"])
    except (ValueError, KeyError):
        raise ParameterError(f"{text!r} is not an amount of memory: write it like 2GiB, 512MB or 1073741824") from None


def format_bytes(count: float) -> str:
    """1536 -> ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_ago(moment: float) -> str:
    """When that was, ``time.time()`` of then: ``"3 hours ago"``."""
    count = max(time.time() - moment, 0.0)
    for unit, length in (("second", 60), ("minute", 60), ("hour", 24), ("day", 7), ("week", 10**9)):
        if count < length:
            return f"{count:.0f} {unit}{'' if round(count) == 1 else 's'} ago"
        count /= length
    raise AssertionError("unreachable")
