"""What the worst JSON costs a server: processor time, memory, and how long /health takes meanwhile.

    python -m benchmarks bodies                      # every kind of body, 8 MiB each, one after the other

Each body is as large as the server takes, or as near to its other bounds as a kind can be. Memory is the most that the
process held meanwhile, beyond what it held before with its free pages given back. Linux only.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.attack import health
from benchmarks.figures import Measuring, add_json, emit
from benchmarks.servers import Started, spent, started
from benchmarks.soak import at_rest

SERVER = f"{sys.executable} -m benchmarks.soak_server {{port}} ngram"
BYTES = 8 << 20
SECONDS, MEMORY, HEALTH = 0.5, 100 << 20, 0.2  # what a body may take of the processor, of memory; what /health may
_VALUES = 1 << 17  # of a body, as the server's default has it
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_MESSAGE = b'{"role":"user","content":"a"}'
_TOOL = b'{"type":"function","function":{"name":"a%d","parameters":{"type":"object","properties":{}}}}'


def many(item: bytes, count: int = BYTES) -> bytes:
    """A list of so many or of as many as there is room for. A %d in an item is its number."""
    count = min(count, (BYTES - 200) // (len(item) + 1 + 6 * item.count(b"%d")))
    return b"[%s]" % b",".join(item % i if b"%d" in item else item for i in range(count))


def named(item: bytes, count: int = BYTES) -> bytes:
    """The same, as an object; of an item the name is the first part."""
    return b"{%s}" % many(item, count)[1:-1]


def chat(**fields: bytes) -> bytes:
    """A request for a chat, with such JSON in fields."""
    return text(**{"prompt": b"null", "messages": b"[%s]" % _MESSAGE, **fields})


def text(**fields: bytes) -> bytes:
    """A request for a completion."""
    fields = {"prompt": b'"a"', "max_tokens": b"1", **fields}
    return b"{%s}" % b",".join(b'"%s":%s' % (name.encode(), value) for name, value in fields.items())


def filled(count: int, item: bytes) -> bytes:
    """A list of ``count`` items that are as long as they can be, where %b stands."""
    return many(item.replace(b"%b", b"x" * (BYTES // count - len(item) - 1)), count - 1)


def logprobs(count: int, others: int) -> bytes:
    """An answer of so many tokens, to be replayed; ``others``: alternatives to each."""
    other = b'{"token":"a","logprob":-0.5,"bytes":[97]}'
    entry = b'%b,"top_logprobs":%b}' % (other[:-1], many(other, others))
    choice = b'{"message":{"content":"a"},"logprobs":{"content":%s}}' % many(entry, count)
    return b'{"request":%s,"answer":{"object":"chat.completion","choices":[%s]}}' % (chat(), choice)


def listed(name: str, item: bytes) -> Callable[[], tuple[str, bytes]]:
    """A chat with a field that is a long list."""
    return lambda: (_CHAT, chat(**{name: many(item)}))


KINDS: Mapping[str, Callable[[], tuple[str, bytes]]] = {
    **{
        f"{words} in {name}": listed(name, item)
        for name in ("messages", "tools", "stop")
        for words, item in (("numbers", b"1"), ("lists", b"[]"), ("objects", b"{}"), ("strings", b'"a"'))
    },
    "messages": lambda: (_CHAT, chat(messages=many(_MESSAGE))),
    "messages, as many as may be": lambda: (_CHAT, chat(messages=many(_MESSAGE, _VALUES // 17))),
    "long messages": lambda: (_CHAT, chat(messages=filled(8000, b'{"role":"user","content":"%b"}'))),
    "one long message": lambda: (_CHAT, chat(messages=filled(2, b'{"role":"user","content":"%b"}'))),
    "parts of a message": lambda: (
        _CHAT, chat(messages=b'[{"role":"user","content":%s}]' % many(b'{"type":"text","text":"a"}', 7000)),
    ),
    "tools": lambda: (_CHAT, chat(tools=many(_TOOL))),
    "tools, as many as may be": lambda: (_CHAT, chat(tools=many(_TOOL, _VALUES // 16 // 4))),
    "deep lists": lambda: (_CHAT, b"[" * BYTES),
    "deep lists in messages": lambda: (_CHAT, chat(messages=b"[" * 4_000_000 + b"]" * 4_000_000)),
    "deep objects": lambda: (_CHAT, b'{"a":' * (BYTES // 5)),
    "deep objects in tools, as many as may be": lambda: (_CHAT, chat(tools=b'{"a":' * 8000 + b"1" + b"}" * 8000)),
    "names": lambda: (_CHAT, named(b'"a%d":1')),
    "names, as many as may be": lambda: (_CHAT, named(b'"a%d":1', _VALUES // 4 - 1)),
    "names in a schema": lambda: (
        _CHAT, chat(response_format=b'{"type":"json_schema","json_schema":{"name":"a","schema":{"properties":%s}}}'
                    % named(b'"a%d":{}', _VALUES // 17)),
    ),
    "bias": lambda: (_CHAT, chat(logit_bias=named(b'"%d":1'))),
    "bias, as much as may be": lambda: (_CHAT, chat(logit_bias=named(b'"%d":1', _VALUES // 4 - 10))),
    "bias of words": lambda: (_CHAT, chat(logit_bias=named(b'"a%d":"a"', _VALUES // 9))),
    "token ids that stop": lambda: (_CHAT, chat(stop_token_ids=many(b"1"))),
    "token ids that stop, as many as may be": lambda: (_CHAT, chat(stop_token_ids=many(b"1", _VALUES - 100))),
    "words that are bad": lambda: (_CHAT, chat(bad_words=many(b'"a"', _VALUES // 4 - 10))),
    "token ids as a prompt": lambda: (_TEXT, text(prompt=many(b"1"))),
    "token ids as a prompt, as many as may be": lambda: (_TEXT, text(prompt=many(b"1", _VALUES - 100))),
    "prompts": lambda: (_TEXT, text(prompt=many(b'"a"', _VALUES // 4 - 10))),
    "prompts of token ids": lambda: (_TEXT, text(prompt=many(b"[1,1,1,1,1,1,1,1,1,1,1,1,1,1]", _VALUES // 17))),
    "token ids to be text": lambda: ("/detokenize", b'{"tokens":%s}' % many(b"1", _VALUES - 100)),
    "long text to be tokens": lambda: ("/tokenize", b'{"prompt":"%b"}' % (b"several words " * (BYTES // 14 - 10))),
    "blanks to be tokens": lambda: ("/tokenize", b'{"prompt":"%b"}' % (b" " * 3 * _VALUES)),
    "digits to be tokens": lambda: ("/tokenize", b'{"prompt":"%b"}' % (b"1" * 3 * _VALUES)),
    "Chinese to be tokens": lambda: ("/tokenize", b'{"prompt":"%b"}' % ("\u8aad".encode() * 3 * _VALUES)),
    "blanks as a prompt": lambda: (_TEXT, text(prompt=b'"%b"' % (b" " * 3 * _VALUES))),
    "control tokens in a message": lambda: (
        _CHAT, chat(messages=b'[{"role":"user","content":"%b"}]' % (b"<|im_end|>" * (BYTES // 10 - 20))),
    ),
    "blanks in a message": lambda: (
        _CHAT, chat(messages=b'[{"role":"user","content":"%b"}]' % (b" " * (3 * _VALUES - 100))),
    ),
    "a long tool": lambda: (
        _CHAT, chat(tools=b'[{"type":"function","function":{"name":"a","description":"%b"}}]' % (b"<" * (BYTES - 300))),
    ),
    "escapes": lambda: (_TEXT, text(prompt=b'"%b"' % (rb"\u0041" * (BYTES // 6 - 20)))),
    "quotes": lambda: (_TEXT, text(prompt=b'"%b"' % (rb"\"" * (BYTES // 2 - 50)))),
    "digits": lambda: (_CHAT, chat(seed=b"1" * (BYTES - 200))),
    "decimals": lambda: (_CHAT, chat(temperature=b"0." + b"1" * (BYTES - 200))),
    "blanks": lambda: (_CHAT, b" " * (BYTES - 200) + chat()),
    "no UTF-8": lambda: (_CHAT, b'{"a":"' + b"\xff" * (BYTES - 200)),
    "a long name": lambda: (_CHAT, b'{"%b":1}' % (b"a" * (BYTES - 200))),
    "a long grammar": lambda: (_CHAT, chat(grammar=b'{"type":"regex","value":"%b"}' % (b"a|" * (BYTES // 2 - 200)))),
    "items of a response": lambda: ("/v1/responses", b'{"input":%s}' % many(_MESSAGE, _VALUES // 17)),
    "messages of Anthropic's": lambda: (
        "/v1/messages", b'{"model":"demo","max_tokens":1,"messages":%s}' % many(_MESSAGE, _VALUES // 17),
    ),
    "messages of Ollama's": lambda: ("/api/chat", b'{"model":"demo","messages":%s}' % many(_MESSAGE, _VALUES // 17)),
    "tokens to be replayed": lambda: ("/v1/replay", logprobs(20_000, 0)),
    "alternatives to be replayed": lambda: ("/v1/replay", logprobs(1500, 20)),
    "names to be replayed": lambda: (
        "/v1/replay", b'{"request":%b,"answer":{"object":"text_completion",%b}'
        % (text(), named(b'"a%d":1', 260_000)[1:] + b"}"),
    ),
}  # fmt: skip


def measured(server: Started, kind: str) -> dict[str, Any]:
    """One body, sent to a soak's server and answered. Raises OSError where the server breaks off."""
    path, body = KINDS[kind]()
    port = int(server.remote.url.rpartition(":")[2])
    waits, answered = [health(port)], threading.Event()

    def watch() -> None:
        while not answered.is_set():
            waits.append(health(port))
            time.sleep(0.005)

    idle = at_rest(port)["memory"]
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak begins anew
    used = spent(server.pid).all
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", path, body, {"content-type": "application/json"})
        status = connection.getresponse().status
        connection.close()
    finally:
        answered.set()
        watcher.join()
    return {
        "kind": kind, "bytes": len(body), "status": status, "seconds": spent(server.pid).all - used,
        "memory": peak(server.pid) - idle, "health": max(waits),
    }  # fmt: skip


def peak(pid: int) -> int:
    """Bytes: the most memory that a process has held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["VmHWM"].split()[0]) << 10


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--log", type=Path, default=Path("bodies.log"), help="where the server's log goes")
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """1 where a body took more of the processor or of memory than it may, or /health too long."""
    found = list[dict[str, Any]]()
    with started(SERVER, given.log) as server, Measuring() as measuring:
        measured(server, "blanks")  # what is made once, for the first answer
        for kind in given.kinds:
            found.append(measured(server, kind))
            figures = "HTTP {status}  {seconds:.2f} s  {memory} bytes  /health {health:.3f} s".format(**found[-1])
            print(f"{kind:42}{figures}", flush=True)
    emit(given, {"bodies": found})
    wrong = [
        each["kind"] for each in found
        if each["seconds"] > SECONDS or each["memory"] > MEMORY or each["health"] > HEALTH
    ]  # fmt: skip
    for kind in wrong:
        print(f"FAILED: {kind}", file=sys.stderr)
    return measuring.end(1 if wrong else 0)
