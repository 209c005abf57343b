"""Files over HTTP: a download that was cut goes on where it stopped; a file is only there once its checksum is right.

Only the standard library. The token goes to the host that was asked and to no other, and into no message.
"""

from __future__ import annotations

import email.utils
import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from urllib.parse import urlsplit

from outpace.common.units import format_bytes
from outpace.errors import ModelError

ATTEMPTS = 5  # in a row without a byte of progress
LONGEST_WAIT = 120.0  # seconds that a server may ask for; beyond them a person decides
_TIMEOUT = 30.0  # seconds without a byte
_BLOCK = 1 << 20
_MOST_JSON = 64 << 20  # bytes of a listing
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_NETWORK = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


Headers: TypeAlias = "Message[str, str]"


class StatusError(Exception):
    """A server's refusal that waiting does not mend. ``code``: the HTTP status."""

    def __init__(self, code: int, headers: Headers) -> None:
        super().__init__(describe(code))
        self.code, self.headers = code, headers


class UnreachableError(Exception):
    """No answer, after several attempts; the message says why."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A file to be had. ``digest``: 64 hexadecimal digits are its SHA-256, 40 are Git's SHA-1 of it."""

    url: str
    name: str  # as messages call it
    size: int
    digest: str

    def hasher(self) -> Any:
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)


class Web:
    """Requests to one hub. ``token`` is sent to its host alone; ``wait``: sleeps so many seconds."""

    def __init__(self, token: str | None = None, wait: Callable[[float], None] = time.sleep) -> None:
        self._token, self._wait = token, wait
        self._opener = urllib.request.build_opener(_Redirects)

    def json(self, url: str) -> Any:
        """Raises StatusError, UnreachableError, or ValueError for what is no JSON."""
        with self.open(url, {}) as response:
            try:
                data = response.read(_MOST_JSON + 1)
            except (OSError, http.client.HTTPException) as error:
                raise UnreachableError(_reason(error)) from error
        if len(data) > _MOST_JSON:
            raise ValueError(f"it has more than {format_bytes(_MOST_JSON)}")
        return json.loads(data)

    def head(self, url: str) -> Headers:
        """The headers that the host itself gives for ``url``, not those of another that it points to."""
        try:
            with self.open(url, {}, "HEAD") as response:
                headers: Headers = response.headers
                return headers
        except StatusError as error:
            if 300 <= error.code < 400:
                return error.headers
            raise

    def open(self, url: str, headers: Mapping[str, str], method: str = "GET") -> Any:
        """The answer, once there is one. Raises StatusError or UnreachableError."""
        request = urllib.request.Request(url, headers={"User-Agent": "outpace", **headers}, method=method)
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            pause = 0.25 * 2**attempt
            try:
                return self._opener.open(request, timeout=_TIMEOUT)
            except urllib.error.HTTPError as error:
                with error:
                    asked = retry_after(error.headers)
                if last or error.code not in _AGAIN or (asked or 0) > LONGEST_WAIT:
                    raise StatusError(error.code, error.headers) from None
                pause = pause if asked is None else asked
            except _NETWORK as error:
                if last:
                    raise UnreachableError(_reason(error)) from error
            self._wait(pause)
        raise AssertionError("unreachable")

    def fetch(self, remote: Remote, path: Path, advance: Callable[[int], None]) -> None:
        """Make ``path`` the remote file: what is in ``path``.part already is not asked for again.

        ``advance`` is told the bytes that are there, negative where they are given up. One process at a time. Raises
        ModelError, StatusError or UnreachableError; what was downloaded stays, for the next time.
        """
        part = path.with_name(path.name + ".part")
        try:
            room = shutil.disk_usage(path.parent).free
            left = remote.size - (part.stat().st_size if part.is_file() else 0)
            if room < left:
                raise ModelError(
                    f"{remote.name} needs {format_bytes(left)} more, and {path.parent} has {format_bytes(room)}: free "
                    "some space, or set OUTPACE_CACHE to another folder"
                )
            while True:
                with part.open("ab") as file:
                    whole = _Part(file, remote, advance)
                    self._fill(whole)
                    file.flush()
                    os.fsync(file.fileno())
                if whole.right:
                    part.replace(path)
                    return
                part.unlink()
                advance(-whole.have)
                if not whole.resumed:
                    raise ModelError(
                        f"{remote.name} was downloaded, but its checksum is {whole.digest}, not {remote.digest}: try "
                        "again; if that does not help, the hub or something on the way changes the file"
                    )
        except OSError as error:
            raise ModelError(
                f"{part} cannot be written ({error.strerror or error}): free some space, or set OUTPACE_CACHE"
            ) from error

    def _fill(self, part: _Part) -> None:
        failures = 0
        while part.left:
            before = part.have
            reason = self._some(part)
            if not part.left:
                return
            failures = 0 if part.have > before else failures + 1
            if failures == ATTEMPTS:
                raise UnreachableError(
                    f"{reason}; {format_bytes(part.have)} of {format_bytes(part.remote.size)} are there, and are kept"
                )
            if failures:
                self._wait(0.25 * 2**failures)

    def _some(self, part: _Part) -> str:
        """Download what is left, as far as it goes; why it went no further."""
        headers = {"Accept-Encoding": "identity"}
        if part.have:
            headers["Range"] = f"bytes={part.have}-"
        try:
            response = self.open(part.remote.url, headers)
        except StatusError as error:
            if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and part.have:
                part.restart()
                return str(error)
            raise
        with response:
            if part.have:
                part.resumed = True
                if not _continues(response, part.have):
                    part.restart()  # it begins at the beginning
            while part.left:
                try:
                    block = response.read(min(_BLOCK, part.left))
                except (OSError, http.client.HTTPException) as error:
                    return _reason(error)
                if not block:
                    return "the connection was cut"
                part.add(block)
        return ""


class _Part:
    """A file that grows, and its checksum so far."""

    def __init__(self, file: BinaryIO, remote: Remote, advance: Callable[[int], None]) -> None:
        self.remote, self._file, self._advance = remote, file, advance
        self.have, self._hash = 0, remote.hasher()
        self.resumed = False  # some of it is another request's
        if 0 < file.tell() <= remote.size:
            with open(file.name, "rb") as there:
                while block := there.read(_BLOCK):
                    self._hash.update(block)
                    self.have += len(block)
            self.resumed = True
            advance(self.have)
        else:
            file.truncate(0)

    @property
    def left(self) -> int:
        return self.remote.size - self.have

    @property
    def digest(self) -> str:
        return str(self._hash.hexdigest())

    @property
    def right(self) -> bool:
        return self.digest == self.remote.digest

    def add(self, block: bytes) -> None:
        self._file.write(block)
        self._hash.update(block)
        self.have += len(block)
        self._advance(len(block))

    def restart(self) -> None:
        self._file.truncate(0)
        self._advance(-self.have)
        self.have, self._hash, self.resumed = 0, self.remote.hasher(), False


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to the same host with the token and elsewhere without it; never from HTTPS to HTTP."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        here, there = urlsplit(req.full_url), urlsplit(newurl)
        if here.scheme == "https" and there.scheme != "https":
            raise urllib.error.URLError("it redirects from HTTPS to an address that is not")
        same = (here.scheme, here.netloc) == (there.scheme, there.netloc)
        if req.get_method() == "HEAD" and not same:
            return None  # its own headers are what was asked for
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None:
            new.method = req.get_method()
            token = req.unredirected_hdrs.get("Authorization")
            if same and token is not None:
                new.add_unredirected_header("Authorization", token)
        return new


def describe(code: int) -> str:
    """An HTTP status in words."""
    try:
        return f"HTTP {code}, {HTTPStatus(code).phrase}"
    except ValueError:
        return f"HTTP {code}"


def retry_after(headers: Headers) -> float | None:
    """Seconds that the header Retry-After asks for, as a number or as a date; None where it does not say."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _continues(response: Any, have: int) -> bool:
    said = str(response.headers.get("Content-Range", ""))
    return response.status == HTTPStatus.PARTIAL_CONTENT and said.startswith(f"bytes {have}-")


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    said = getattr(inner, "strerror", None) or str(inner) or type(inner).__name__
    return str(said).splitlines()[0]
