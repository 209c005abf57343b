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


def run(arguments: Sequence[str], replicas: str, address: str | None) -> int:
    """``arguments``: of ``outpace serve``. Without an ``address`` replicas run here until a signal; on a cluster they
    stay when this returns, and the same command again replaces them one by one. Raises ParameterError."""
    found = re.fullmatch(r"([1-9]\d{0,3})(?:-([1-9]\d{0,3}))?", replicas)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ParameterError(Argument("replicas", replicas), " is no count: give one such as 2, or a range such as 1-4")
    least, most = int(found[1]), int(found[2] or found[1])
    own, options = _own().parse_known_args(arguments)
    if address is None:
        if own.threads is None:
            own.threads = max(1, (os.cpu_count() or 1) // most)
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
    else:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    if own.threads is not None:
        options += ["--threads", str(own.threads)]
    options += ["--max-rows", str(own.max_rows), "--max-body", str(own.max_body), "--drain", str(own.drain)]
    options += ["--device", own.device]
    cores = 0 if address is None else own.threads or 1
    count: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": own.max_rows}
        count = {"autoscaling_config": scaling}
    replica = serve.deployment(
        Replica, name="Replica", max_ongoing_requests=_PLACES, graceful_shutdown_timeout_s=own.drain,
        graceful_shutdown_wait_loop_s=0.5, health_check_period_s=_HEALTH, health_check_timeout_s=2 * LIFE,
        ray_actor_options={"num_cpus": cores, "num_gpus": int(own.device == "cuda")},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter), **count,
    )  # fmt: skip
    ingress = serve.deployment(
        Ingress, name="Ingress", max_ongoing_requests=_PLACES,
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},  # where the HTTP proxy is
        graceful_shutdown_timeout_s=own.drain,
    )  # fmt: skip
    serve.start(proxy_location="HeadOnly", http_options={"host": own.host, "port": own.port})
    bound = replica.bind(options, uuid.uuid4().hex, address is None)
    serve.run(ingress.bind(bound, own.max_body), name=NAME, route_prefix="/")
    print(f"{replicas} replicas at http://{own.host}:{own.port}/v1", file=sys.stderr, flush=True)
    if address is None:
        stopped = threading.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: stopped.set())
        stopped.wait()
        serve.shutdown()
    return 0


def _own() -> argparse.ArgumentParser:
    """The options that are not passed on as they are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--replicas")
    parser.add_argument("--ray")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", "-p", type=int, default=8000)
    parser.add_argument("--threads", "-t", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-rows", type=int, default=16)
    parser.add_argument("--max-body", type=int, default=8 << 20)
    parser.add_argument("--drain", type=float, default=30.0)
    return parser
