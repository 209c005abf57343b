"""The server of ``benchmarks.soak``: ours, with ``GET /soak``, which says what it holds and checks its engine.

python -m benchmarks.soak_server PORT [DRAFTER [CACHE_DIR]]
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse
from starlette.routing import Route

from outpace import AsyncEngine, Engine
from outpace.common import allocator
from outpace.server.engines.models import SingleModel, system_fingerprint
from outpace.server.engines.runner import Server, bound, steady
from outpace.server.engines.service import Service
from outpace.server.observe.metrics import Metrics
from outpace.server.settings import ServerSettings
from outpace.text.middle import Middle

CACHE = 64 << 20  # bytes of KV in CACHE_DIR, which an attack fills
KV = 32 << 20  # bytes: what eight rows of the soak's longest answers need and more, so that it is full at times

MIDDLE = Middle(prefix=7, suffix=8, middle=9)  # tokens of the demo stand in for those that it lacks


def counted(engine: Engine) -> dict[str, int]:
    """In the engine's thread. Raises AssertionError where an invariant is broken, a leaked row or block too."""
    engine.check()
    return {"busy": int(not engine.idle), "rows": len(engine.model.kv.rows), "kv_bytes": engine.model.kv.bytes}


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def state(service: Service, serving: AsyncEngine) -> dict[str, Any]:
    known = [service.known(name) for name in service.models.names()]
    if not service.inside:
        await service.work(allocator.trim)  # as when it is idle
    return {
        **await serving.ask(counted),
        "inside": service.inside,
        "samples": sum(each.admission.inside for each in known if each is not None),
        "threads": threading.active_count(),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "memory": resident(),
    }


async def serve(port: int, drafter: str, cache: str | None = None) -> None:
    allocator.few_arenas()
    settings = ServerSettings(port=port, drain=20.0)
    with bound(settings) as listener:
        size = CACHE if cache else None
        engine = Engine.load(
            "demo", drafter=drafter, max_length=1024, max_rows=8, kv_memory=KV, cache_dir=cache, cache_size=size
        )
        assert engine.tokenizer is not None
        engine.tokenizer.middle = MIDDLE
        serving = AsyncEngine(engine)
        service = Service(
            SingleModel("demo", serving),
            settings,
            fingerprint=lambda its: system_fingerprint(its),
            observers=[Metrics()],
        )
        server = Server(service, listener)

        async def answer(request: Any) -> JSONResponse:
            return JSONResponse(await state(service, serving))

        steady()
        app: Any = server.config.app
        app.router.routes.append(Route("/soak", answer))
        await server.run_until_stopped()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), *(sys.argv[2:] or ["auto"])))
