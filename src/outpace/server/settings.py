"""What a server is started with: ``ServerSettings``, validated before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from outpace.errors import Argument, ParameterError

_LEAST = {  # of whole numbers
    "queue": 0,
    "max_body": 1024,
    "max_n": 1,
    "max_logprobs": 0,
    "max_prompts": 1,
    "traces": 0,
    "max_connections": 1,
    "max_connections_each": 1,
    "max_values": 1024,
}
_SECONDS = ("drain", "write_timeout", "keep_alive", "request_timeout", "header_timeout", "body_timeout", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Raises ParameterError that names the value and the remedy.

    ``queue``: samples that may wait beyond those that run; ``max_body``: bytes of a request; ``max_prompts``: of one
    request for completions; ``max_values``: numbers, strings, lists and objects in one body; ``traces``: every step is
    kept of so many last answers; ``max_connections``: open at once, ``max_connections_each``: of one address;
    ``allow_hosts``: names that a Host header may have beside those of this machine; ``control_tokens``: texts of
    requests may spell control tokens. In seconds: ``request_timeout``: for one answer, after which it ends as it is
    (None: no bound); ``header_timeout``, ``body_timeout``: for a request to arrive; ``write_timeout``: for a reader to
    take what was written; ``keep_alive``: between signs of life in a stream; ``drain``: for what runs when the server
    is to stop; ``idle``: without a request, after which free memory goes back to the system.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    queue: int = 256
    max_body: int = 8 << 20
    max_n: int = 128
    max_logprobs: int = 20
    max_prompts: int = 128
    max_values: int = 1 << 17
    max_connections: int = 1024
    max_connections_each: int = 512
    traces: int = 0
    control_tokens: bool = False
    request_timeout: float | None = None
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    write_timeout: float = 30.0
    keep_alive: float = 10.0
    drain: float = 30.0
    idle: float = 5.0
    cors: tuple[str, ...] = ()  # origins; none: no cross-origin requests
    allow_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.host:
            raise ParameterError(Argument("host", self.host), " is empty: give an address such as 127.0.0.1")
        _whole("port", self.port, 0, 65535)
        for name, least in _LEAST.items():
            _whole(name, getattr(self, name), least, 2**31 - 1)
        for name in _SECONDS:
            value = getattr(self, name)
            if value is None and name == "request_timeout":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ParameterError(Argument(name, value), " is out of range: give seconds above 0")
        for key in self.api_keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise ParameterError("an API key is unusable: give 8 or more ASCII characters without spaces")
        for origin in self.cors:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ParameterError(
                    Argument("cors", origin), " is no origin: give one such as https://example.org, or *"
                )
        for host in self.allow_hosts:
            if not host or not host.isascii() or not host.isprintable() or set("/: ") & {*host}:
                raise ParameterError(Argument("allow_host", host), " is no host name: give one such as example.org")

    @property
    def loopback(self) -> bool:
        """Whether it listens for this machine alone."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ParameterError(Argument(name, value), f" is out of range: give a whole number from {low} to {high}")
