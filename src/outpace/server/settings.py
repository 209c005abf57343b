"""What a server is started with: ``ServerSettings``, validated before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, ClassVar

from outpace.common.parameter import Each, Integer, Interval, check, defined
from outpace.errors import Argument, ParameterError
from outpace.params import PARAMETERS, SamplingParams

_SECONDS = Interval("(0, inf)", "give seconds above 0")


def _from(least: int) -> Integer:
    return Integer(least, 2**31 - 1)


_APPS = ("app://", "chrome-extension://", "moz-extension://", "tauri://", "vscode-webview://")  # pages of programs


def _is_origin(text: str) -> bool:
    return text == "*" or text.startswith(("http://", "https://", *_APPS))


def _is_host(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and not set("/: ") & {*text}


def _is_names(text: str) -> bool:
    return all(name.strip() for name in text.split(","))


# parameters by their names in requests; responses have no ``n``
REQUESTED = {each.request: each for each in PARAMETERS.values() if each.request is not None and each.name != "n"}
_DEFAULTS = {name: each for name, each in REQUESTED.items() if name != "logit_bias"}
_DEFAULTS["max_tokens"] = PARAMETERS["max_tokens"]


def _value(name: str, text: str) -> Any:
    """JSON, or a text without quotes; -1 tokens, as in requests: as many as the context holds."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return None if name == "max_tokens" and value == -1 else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Raises ParameterError that names the value and the remedy."""

    GROUP: ClassVar[str] = "limits"

    host: str = defined("127.0.0.1", "Address to listen at.", group="")
    port: int = defined(
        8000, "Port to listen at. 0: any that is free.", Integer(0, 65535), option=("--port", "-p"), group=""
    )
    api_keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = defined(
        (), "Pages of this origin may ask; of all that begin so, such as vscode-webview://. Repeatable.",
        Each(_is_origin, f" is no origin: give one such as https://example.org, one of {' '.join(_APPS)}, or *"),
        metavar="ORIGIN", group="",
    )  # fmt: skip
    allow_hosts: tuple[str, ...] = defined(
        (), "Also a name of this server, as a proxy calls it. Repeatable.",
        Each(_is_host, " is no host name: give one such as example.org"), option=("--allow-host",), metavar="NAME",
        group="",
    )  # fmt: skip
    aliases: tuple[str, ...] = defined(
        (), "Also names of the model, between commas. Repeatable.",
        Each(_is_names, " are no names: give some such as small,fast"), option=("--alias", "-a"), metavar="NAMES",
        group="",
    )  # fmt: skip
    defaults: tuple[str, ...] = defined(
        (), "What requests get that do not say it, such as temperature=0.7 or max_tokens=512. Repeatable.",
        Each(lambda text: text.partition("=")[0] in _DEFAULTS, " sets no parameter: give one such as temperature=0.7"),
        option=("--default",), metavar="NAME=VALUE", group="",
    )  # fmt: skip
    sampling: Mapping[str, Any] = field(default_factory=dict, init=False)  # ``defaults``, by names of requests
    any_name: bool = defined(False, "Requests may call the only model what they like.", group="")
    control_tokens: bool = defined(False, "Texts of chats may spell control tokens, such as <|im_end|>.", group="")
    open_schemas: bool = defined(
        False, "Objects of JSON schemas may have properties that these do not name, unless they forbid it.", group=""
    )
    strict_fields: bool = defined(
        False, "Refuse fields of requests that are not known, in place of ignoring them.", group=""
    )
    queue: int = defined(256, "Answers that may wait beyond those; then it is 429.", _from(0))
    request_timeout: float | None = defined(None, "Seconds of an answer, after which it ends as it is.", _SECONDS)
    drain: float = defined(30.0, "Seconds that running requests have when it stops.", _SECONDS)
    max_body: int = defined(8 << 20, "Bytes of a request.", _from(1024))
    max_n: int = defined(128, "Answers to one prompt.", _from(1))
    max_logprobs: int = defined(20, "Alternatives a token.", _from(0))
    max_prompts: int = defined(128, "Prompts of one request for completions.", _from(1), option=None)
    max_values: int = defined(1 << 17, "Values in a request's JSON.", _from(1024))
    max_connections: int = defined(1024, "Connections at once.", _from(1))
    max_connections_each: int = defined(512, "Connections of one address; a proxy is one.", _from(1))
    traces: int = defined(0, "Keep every step of so many last answers, for the page.", _from(0), group="output")
    trace_probabilities: bool = defined(
        False, "With --traces: what decided each token, too, at some milliseconds each.", group="output"
    )
    header_timeout: float = defined(10.0, "Seconds in which a request's head must arrive.", _SECONDS, option=None)
    body_timeout: float = defined(60.0, "Seconds in which its body must.", _SECONDS, option=None)
    write_timeout: float = defined(30.0, "Seconds a reader has to take what was written.", _SECONDS, option=None)
    keep_alive: float = defined(10.0, "Seconds between signs of life in a stream.", _SECONDS, option=None)
    idle: float = defined(
        5.0, "Seconds without a request, after which free memory goes back to the system.", _SECONDS, option=None
    )

    def __post_init__(self) -> None:
        if not self.host:
            raise ParameterError(Argument("host", self.host), " is empty: give an address such as 127.0.0.1")
        check(self)
        if self.trace_probabilities and not self.traces:
            raise ParameterError(Argument("trace_probabilities"), " is of traces: give ", Argument("traces"), ", too")
        names = [name.strip() for text in self.aliases for name in text.split(",")]
        object.__setattr__(self, "aliases", tuple(dict.fromkeys(names)))
        pairs = [(name, _value(name, text)) for name, _, text in (given.partition("=") for given in self.defaults)]
        object.__setattr__(self, "sampling", dict(pairs))
        SamplingParams(**{_DEFAULTS[name].name: value for name, value in pairs})
        for key in self.api_keys:
            if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
                raise ParameterError("an API key is unusable: give 8 or more ASCII characters without spaces")

    def allows(self, origin: str) -> bool:
        """Whether pages of this origin may ask."""
        return any(
            allowed in ("*", origin) or (allowed in _APPS and origin.startswith(allowed)) for allowed in self.cors
        )

    @property
    def loopback(self) -> bool:
        """Whether it listens for this machine alone."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
