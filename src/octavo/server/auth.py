"""Who may use the server: API keys, kept as digests, and what keeps one key's prompts out of another's cache."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo import limits
from octavo.errors import ConfigError
from octavo.server.errors import ApiError
from octavo.server.exchange import OPENAI, Exchange, Message, Receive, Send
from octavo.server.state import Scope

if TYPE_CHECKING:
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp

log = logging.getLogger("octavo")

TENANT = "octavo.tenant"  # scope key: the name of the key that was sent
_LINE = re.compile(r"([\w.@-]{1,64})\s*[:=]?\s*sha256:([0-9a-fA-F]{64})")


class Keys:
    """Names and SHA-256 digests of the keys; the file is read again when it has changed.

    A file's lines are `name sha256:HEX`, empty or comments (#). Two keys with one name are one tenant: to change a key,
    add the new line, move the clients, remove the old one. A file that has become unreadable changes nothing, and an
    error is logged: neither an open door nor a closed one should come from a slip of an editor.
    """

    def __init__(self, keys: Iterable[str] = (), file: str | Path | None = None) -> None:
        self._given = [(_own_name(key), hashlib.sha256(key.encode()).digest()) for key in keys]
        self._file = None if file is None else Path(file)
        self._stamp: tuple[int, int, int] | None = None
        self._known = list(self._given)
        if self._file is not None:
            self._stamp = _stamp(self._file)
            self._known += read_key_file(self._file)

    @property
    def required(self) -> bool:
        return bool(self._given) or self._file is not None

    def reload(self) -> None:
        """Looks whether the file has changed."""
        if self._file is None:
            return
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._known = self._given + read_key_file(self._file)
            log.info("the key file was read again: %d keys", len(self._known))
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)

    def name_of(self, key: bytes) -> str | None:
        """The key's name; None for a wrong one. The time it takes tells nothing: digests, all of them, are compared."""
        digest = hashlib.sha256(key).digest()
        found = None
        for name, known in self._known:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def read_key_file(path: Path) -> list[tuple[str, bytes]]:
    """Raises ConfigError, which names the line and never shows it."""
    try:
        if path.stat().st_size > 128 * limits.MAX_API_KEYS:
            raise ConfigError(str(path), f"a file of at most {limits.MAX_API_KEYS} keys")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path}", f"a file that can be read ({type(error).__name__})") from None
    keys = []
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{path}, line {number},", "a line `name sha256:HEX`, of a key's SHA-256 in hexadecimal")
        keys.append((match[1], bytes.fromhex(match[2])))
    return keys


def _own_name(key: str) -> str:
    """A key given by itself is named by its digest, so that the order of several does not matter."""
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:12]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def salt_of(scope: Scope, asked: str | None) -> str | None:
    """Prefixes are shared only under equal salts: of one tenant, and as that tenant asks.

    A hash over both, with a mark between that neither can hold: no choice of one imitates another.
    """
    tenant = scope.get(TENANT)
    if tenant is None:
        return asked
    given = "" if asked is None else "\0" + asked
    return hashlib.sha256(f"octavo cache salt\0{tenant}{given}".encode("utf-8", "surrogatepass")).hexdigest()


class Guard:
    """Lets nobody through without a key, but to the route objects in `public`.

    It knows no paths: whatever of a request could be written in two ways is seen by the router alone.
    """

    def __init__(self, app: ASGIApp, keys: Keys, public: Sequence[BaseRoute]) -> None:
        self._app = app
        self._keys = keys
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._keys.required:
            self._keys.reload()
            scope[TENANT] = self._tenant(scope)
            if scope[TENANT] is None and not await self._is_public(scope, receive, send):
                refused = ApiError(401, "a valid API key is needed: send the header authorization: Bearer KEY")
                refused.headers["www-authenticate"] = "Bearer"
                await Exchange(scope, receive, _without_body(scope, send), OPENAI).fail(refused)
            if scope[TENANT] is None:
                return
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str | None:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) != 1:
            return None
        kind, _, key = sent[0].partition(b" ")
        if kind.lower() != b"bearer" or not 1 <= len(key.strip()) <= limits.MAX_API_KEY_CHARS:
            return None
        return self._keys.name_of(key.strip())

    async def _is_public(self, scope: Scope, receive: Receive, send: Send) -> bool:
        from starlette.routing import Match

        for route in self._public:
            match, child = route.matches(scope)
            if match is Match.FULL:
                await route.handle({**scope, **child}, receive, send)
                return True
        return False


def _without_body(scope: Scope, send: Send) -> Send:
    async def headers_only(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return headers_only if scope["method"] == "HEAD" else send
