"""Drives an engine to its end, checking its invariants after every step."""

from __future__ import annotations

from outpace import Engine, Result


def finished(engine: Engine) -> dict[tuple[int, int], Result]:
    """What every request in flight ended with, by request and sample; in that order."""
    results: dict[tuple[int, int], Result] = {}
    while not engine.idle:
        for delta in engine.step():
            if delta.result is not None:
                results[delta.request, delta.sample] = delta.result
        engine.check()
    return dict(sorted(results.items()))
