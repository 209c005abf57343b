"""Ray Serve's choice of a replica, made by ``Routes``."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outpace.integrations.ray.routing import Routes


class PrefixRouter(RequestRouter):
    """Of calls whose first arguments are the prompt's beginnings and the replicas to avoid."""

    def initialize_state(self, **options: Any) -> None:
        self._routes = Routes()
        self._running: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        begins, avoid = pending_request.args[:2] if pending_request is not None else ([], [])
        there = {each.replica_id.unique_id: each for each in candidate_replicas}
        chosen = self._routes.choose(begins, {name: self._running[name] for name in there}, avoid)
        if chosen is not None:
            return [[there[chosen]]]
        await asyncio.sleep(0.05)  # Ray asks again at once: a loop without a pause would keep news of new replicas out
        return []

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._running[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._running[replica_id.unique_id] -= 1
