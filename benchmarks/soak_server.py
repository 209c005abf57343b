"""The server of ``benchmarks.soak``: ours, with ``GET /soak``, which says what it holds and checks its engine.

python -m benchmarks.soak_server PORT [DRAFTER]
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse
from starlette.routing import Route

from outpace import AsyncEngine, Engine
from outpace.server.fingerprint import system_fingerprint
from outpace.server.runner import Server, bound
from outpace.server.service import Service
from outpace.server.settings import ServerSettings
from outpace.server.single import SingleModel

KV = 32 << 20  # bytes: what eight rows of the soak's longest answers need and more, so that it is full at times


def held(engine: Engine) -> dict[str, int]:
    """In the engine's thread. Raises AssertionError where an invariant is broken, a leaked row or block too."""
    engine.check()
    return {"busy": int(not engine.idle), "rows": len(engine.model.kv.rows), "kv_bytes": engine.model.kv.bytes}


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trimmed() -> int:
    """The same once the C library's allocator has given back what it keeps free: that goes up and down by 20 MB with
    what its threads' arenas look like, and hides what is held. Where it cannot be asked (not glibc), nothing is."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return resident()


async def state(service: Service, serving: AsyncEngine) -> dict[str, Any]:
    known = [service.known(name) for name in service.models.names()]
    return {
        **await serving.ask(held),
        "inside": service.inside,
        "samples": sum(its.admission.inside for its in known if its is not None),
        "threads": threading.active_count(),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "untrimmed": resident(),
        "memory": await asyncio.to_thread(trimmed),
    }


async def serve(port: int, drafter: str) -> None:
    settings = ServerSettings(port=port, drain=20.0)
    with bound(settings) as listener:
        serving = AsyncEngine(Engine.load("demo", drafter=drafter, max_length=1024, max_rows=8, kv_memory=KV))
        service = Service(SingleModel("demo", serving), settings, fingerprint=lambda its: system_fingerprint(its))
        server = Server(service, listener)

        async def told(request: Any) -> JSONResponse:
            return JSONResponse(await state(service, serving))

        app: Any = server.config.app
        app.router.routes.append(Route("/soak", told))
        await server.run_until_stopped()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "auto"))
