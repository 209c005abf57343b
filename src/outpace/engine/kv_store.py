"""KV of prompts' beginnings on the disk: beyond the memory there is, and beyond the process.

A file has the keys and values of 64 tokens. Its name is a hash of those tokens, of all before them, and of everything
that its bytes depend on: the model's files, the arithmetic, the layout, the scope of requests (Request.cache_scope). So
texts that begin alike share files, and a file that is found by its name holds the bits that would be computed.
Layers with windows have files of their own, of which a beginning needs those that its end sees. Recurrent states have
files, too, where a prompt or an answer ended, each with the part of a block before it.

Source of names by chained hashes: vLLM, "Automatic Prefix Caching" (docs.vllm.ai).
"""

from __future__ import annotations

import hashlib
import json
import logging
import time

from outpace.common.arrays import I32
from outpace.common.files import StrPath, expanded
from outpace.common.units import format_bytes
from outpace.common.version import __version__
from outpace.engine.kv_files import BLOCK, STATE, WINDOW, Counts, KVFiles, checked_limit
from outpace.errors import Argument, MemoryLimitError, ParameterError
from outpace.models.base import Model
from outpace.models.fingerprint import fingerprint, written

log = logging.getLogger(__name__)

_PAYS = 16  # reading so many positions takes no longer than computing one


class Chain:
    """Names of a text's whole blocks, for as many of its tokens as were asked for. ``stored``: blocks at its beginning
    that are on the disk, or will be soon, as far as they were there to be written."""

    def __init__(self, root: str, block: int) -> None:
        self._block, self.keys, self.stored = block, [root], 0

    def reach(self, tokens: I32) -> int:
        """Know the names of all whole blocks of ``tokens`` int32 [n], whose beginning is what it was; how many."""
        whole = len(tokens) // self._block
        for i in range(len(self.keys) - 1, whole):
            self.keys.append(_hash(self.keys[-1], tokens[i * self._block : (i + 1) * self._block]))
        return whole

    def name(self, i: int) -> str:
        """Of the file of block ``i``."""
        return self.keys[i + 1] + BLOCK

    def window(self, i: int) -> str:
        """Of the file of block ``i`` of layers with windows."""
        return self.keys[i + 1] + WINDOW

    def state(self, tokens: I32) -> str:
        """Of the file of the states after all of ``tokens``, whose whole blocks are known."""
        whole = len(tokens) // self._block
        rest = tokens[whole * self._block :]
        return f"states/{self.keys[whole]}-{len(rest)}-{_hash(self.keys[whole], rest)}{STATE}"


def _hash(parent: str, tokens: I32) -> str:
    return hashlib.blake2b(parent.encode() + tokens.tobytes(), digest_size=16).hexdigest()


class Reading:
    """A beginning of ``positions`` tokens on its way from the disk into a row. ``seen``: the first block that windows
    at its end reach; ``state``: the file of its states."""

    def __init__(self, chain: Chain, positions: int, seen: int, state: str | None = None) -> None:
        self.chain, self.positions, self.seen, self.state = chain, positions, seen, state
        self.tail: memoryview | None = None  # the states, and before them what they have of a block


class KVStore:
    """Beginnings of one model's texts in ``folder``. ``size``: bytes of all files there (None: ``kv_files.LIMIT``).

    Raises ParameterError for a folder that cannot be used, and for a model whose rows cannot be exported.
    """

    def __init__(self, model: Model, folder: StrPath, size: int | str | None = None) -> None:
        layout = None if model.native is None else model.kv.layout
        if layout is None or model.path is None:
            raise ParameterError(
                Argument("cache_dir", str(folder)), " is of the native backend alone, with a model from files: "
                "leave it out, or load such a model with ", Argument("backend", "native"),
            )  # fmt: skip
        if layout.window_bytes and layout.state_bytes:
            raise ParameterError(
                Argument("cache_dir", str(folder)), " cannot keep recurrent states beside layers with windows: "
                "leave it out for this model",
            )  # fmt: skip
        self._kv, self._layout = model.kv, layout
        about = {
            "model": model.info.name,
            "fingerprint": fingerprint(model.path),
            "written": written(model.path),
            "dtype": model.info.dtype,
            "max_length": model.info.max_length,  # rotations may depend on it
            "made": [__version__, *layout.made],
        }
        self._identity = hashlib.blake2b(json.dumps({**about, "model": ""}).encode(), digest_size=16).hexdigest()
        limit = checked_limit(folder, size)
        self.files = KVFiles(expanded(str(folder)), self._identity, limit, about)
        self._hits = self._tokens = 0
        log.info(
            "prompts' KV is kept in %s: %s of at most %s",
            folder, format_bytes(self.files.size), format_bytes(self.files.limit),
        )  # fmt: skip

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        files = self.files
        return Counts(self._hits, self._tokens, files.read_bytes, files.written, files.evicted, files.damaged)

    def chain(self, scope: str) -> Chain:
        """Of a text whose requests have this scope."""
        root = hashlib.blake2b(f"{self._identity} {scope}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
        return Chain(root, self._kv.block)

    # -- into a row --------------------------------------------------------------------------------------------------

    def find(self, chain: Chain, tokens: I32, shared: int) -> Reading | None:
        """The longest beginning of ``tokens`` int32 [n] on the disk, where it is worth reading though a row in memory
        shares so many."""
        whole, block = chain.reach(tokens), self._kv.block
        there = 0
        while there < whole and self.files.has(chain.name(there)):
            there += 1
        chain.stored = there
        if not self._layout.state_bytes:
            if self._layout.window_bytes:
                there = self._within_windows(chain, there, shared // block)
            found = Reading(chain, there * block, self._seen(there))
            return found if found.positions >= shared + block else None
        for i in range(there, -1, -1):
            lengths = {name: i * block + int(name.split("-")[1]) for name in self.files.states(chain.keys[i])}
            fits = [n for name, n in lengths.items() if n <= len(tokens) and name == chain.state(tokens[:n])]
            if fits:
                n = max(fits)
                return Reading(chain, n, 0, chain.state(tokens[:n])) if n - shared > n // _PAYS else None
        return None

    def _seen(self, blocks: int) -> int:
        """The first block that windows behind so many blocks reach."""
        return max(0, blocks * self._kv.block - self._layout.window + 1) // self._kv.block

    def _within_windows(self, chain: Chain, there: int, least: int) -> int:
        """The most blocks, at most ``there``, whose windows are on the disk; ``least`` where those are not more."""
        has = [self.files.has(chain.window(i)) for i in range(there)]
        chain.stored = next((i for i, found in enumerate(has) if not found), there)
        return next((n for n in range(there, least, -1) if all(has[self._seen(n) : n])), least)

    def read(self, reading: Reading, row: int, seconds: float) -> bool:
        """Go on reading into ``row`` for about so long; whether there is more to read. Where files are gone or memory
        is full, the row ends before."""
        until, block = time.perf_counter() + seconds, self._kv.block
        if reading.state is not None and reading.tail is None:  # first, since nothing is worth reading without
            rest = self._layout.block_bytes if reading.positions % block else 0
            reading.tail = self.files.read(reading.state, rest + self._layout.state_bytes)
            if reading.tail is None:
                return False
        try:
            while (at := self._kv.length(row)) // block < reading.positions // block:
                contents = self.files.read(reading.chain.name(at // block), self._layout.block_bytes)
                window = None
                if contents is not None and self._layout.window_bytes and at // block >= reading.seen:
                    window = self.files.read(reading.chain.window(at // block), self._layout.window_bytes)
                    contents = None if window is None else contents
                if contents is None:
                    reading.chain.stored = min(reading.chain.stored, at // block)
                    return False
                self._kv.import_block(row, contents, block, window)
                if time.perf_counter() > until:
                    return True
            if reading.tail is not None:
                if rest := reading.positions % block:
                    self._kv.import_block(row, reading.tail[: self._layout.block_bytes], rest)
                self._kv.import_state(row, reading.tail[len(reading.tail) - self._layout.state_bytes :])
        except MemoryLimitError:
            return False
        self._hits += 1
        self._tokens += reading.positions
        states = [reading.state] if reading.state is not None else []
        self.files.used([*states, *self._names(reading.chain, reading.positions // block)])
        return False

    def _names(self, chain: Chain, blocks: int) -> list[str]:
        """Of files that serve a beginning of so many blocks."""
        windows = range(self._seen(blocks), blocks) if self._layout.window_bytes else ()
        return [*map(chain.name, range(blocks)), *map(chain.window, windows)]

    # -- from a row --------------------------------------------------------------------------------------------------

    def save(self, chain: Chain, row: int, tokens: I32, *, ended: bool = False, wait: bool = False) -> None:
        """Keep what ``row`` holds of ``tokens`` int32 [n], as far as the disk has it not. ``ended``: with its recurrent
        states. ``wait``: however long that takes; else what the disk is too slow for is not kept."""
        whole = chain.reach(tokens)
        while chain.stored < whole:
            at = chain.stored
            if not self._write(chain.name(at), row, at, wait):
                return
            if self._layout.window_bytes and not self._write(chain.window(at), row, at, wait, windowed=True):
                return
            chain.stored += 1
        if not ended:
            return
        self.files.used(self._names(chain, chain.stored))
        for n in reversed(self._kv.state_ends(row)):
            name, block = chain.state(tokens[:n]), n // self._kv.block
            if n > len(tokens) or self.files.has(name):
                continue
            rest = self._kv.export_block(row, block) if n % self._kv.block else b""
            if not self.files.write(name, [rest or b"", self._kv.export_state(row, n)], wait):
                return

    def _write(self, name: str, row: int, block: int, wait: bool, windowed: bool = False) -> bool:
        """Have a block written, unless its file is there or the row has given it back; False: the disk is too slow."""
        if self.files.has(name):
            return True
        contents = self._kv.export_block(row, block, windowed)
        return contents is None or self.files.write(name, [contents], wait)

    def close(self) -> None:
        """Wait until all is written."""
        self.files.close()
