"""When nobody asks for anything, free pages go back to the system."""

from __future__ import annotations

import asyncio

from outpace import allocator
from outpace.server.service import Service


async def trimmed(service: Service) -> None:
    """Until the server ends: trim once nobody has been in the house for ``settings.idle`` seconds, or up to twice that;
    again when somebody has been there since."""
    seen, done = 0, -1  # requests so far, a look ago and when it was trimmed
    while True:
        await asyncio.sleep(service.settings.idle)
        if service.draining:
            return
        if not service.inside and service.came == seen != done:
            await service.work(allocator.trim)
            done = seen
        seen = service.came
