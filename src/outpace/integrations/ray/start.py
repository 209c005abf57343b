"""Starts replicas and their ingress under Ray Serve."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from outpace.errors import Argument, ParameterError
from outpace.integrations.ray.ingress import Ingress
from outpace.integrations.ray.replica import LIFE, Replica
from outpace.integrations.ray.router import PrefixRouter

NAME = "outpace"
_HEALTH = 2.0  # seconds between Ray's looks at a replica
_PLACES = 100_000  # requests at a replica, which bounds them itself
_LONGEST = 3600.0  # seconds that a stream may go on after an update of a cluster, at new replicas


def run(
    arguments: Sequence[str], replicas: str, address: str | None, *, host: str, port: int, threads: int | None,
    device: str, max_rows: int, max_body: int, drain: float,
) -> int:  # fmt: skip
    """``arguments``: of ``outpace serve``; what follows ``address`` was read from them. Without an ``address`` replicas
    run here until a signal; on a cluster they stay when this returns, and the same command again replaces them one by
    one. Raises ParameterError."""
    found = re.fullmatch(r"([1-9]\d{0,3})(?:-([1-9]\d{0,3}))?", replicas)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ParameterError(Argument("replicas", replicas), " is no count: give one such as 2, or a range such as 1-4")
    least, most = int(found[1]), int(found[2] or found[1])
    options = _of_a_replica(arguments)
    if address is None:
        if threads is None:
            threads = max(1, (os.cpu_count() or 1) // most)
            options += ["--threads", str(threads)]
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
    else:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    cores = 0 if address is None else threads or 1
    count: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": max_rows}
        count = {"autoscaling_config": scaling}
    replica = serve.deployment(
        Replica, name="Replica", max_ongoing_requests=_PLACES, graceful_shutdown_timeout_s=drain,
        graceful_shutdown_wait_loop_s=0.5, health_check_period_s=_HEALTH, health_check_timeout_s=2 * LIFE,
        ray_actor_options={"num_cpus": cores, "num_gpus": int(device == "cuda")},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter), **count,
    )  # fmt: skip
    ingress = serve.deployment(
        Ingress, name="Ingress", max_ongoing_requests=_PLACES,
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},  # where the HTTP proxy is
        graceful_shutdown_timeout_s=drain if address is None else max(drain, _LONGEST),
    )  # fmt: skip
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    bound = replica.bind(options, uuid.uuid4().hex, address is None)
    serve.run(ingress.bind(bound, max_body), name=NAME, route_prefix="/")
    print(f"{replicas} replicas at http://{host}:{port}/v1", file=sys.stderr, flush=True)
    if address is None:
        stopped = threading.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: stopped.set())
        stopped.wait()
        serve.shutdown()
    return 0


def _of_a_replica(arguments: Sequence[str]) -> list[str]:
    """``arguments`` without the options that say how many servers there are, and where."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--replicas")
    parser.add_argument("--ray")
    return parser.parse_known_args(arguments)[1]
