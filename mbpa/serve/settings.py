"""Settings of the service: the tokens, and limits on what it accepts."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mbpa.errors import RunError

UNNAMED_TOKEN = "token"  # name of the token that has none of its own, in the audit trail
MAX_TOKEN_NAME_CHARACTERS = 100

# These need no token, since they reveal nothing.
OPEN_PATHS = (
    "/",
    "/health",
    "/docs",
    "/page",
    "/page/page.css",
    "/page/page.js",
    "/openapi.json",
    "/favicon.ico",
)


@dataclass(frozen=True)
class Settings:
    """Limits of the service."""

    token: str | None = field(default=None, repr=False)
    """Token required for every path except `OPEN_PATHS`; `None`: no token is required, unless there
    are named ones."""
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further tokens by the names under which the audit trail lists them."""
    body_bytes: int = 8 << 20
    """Maximum size of a body; larger ones get 413."""
    body_timeout_s: float = 30.0
    """Maximum seconds for a body to arrive; slower requests get 408."""
    in_flight: int = 128
    """Maximum number of requests received completely and not answered yet; further requests get
    429."""
    receiving: int = 1024
    """Maximum number of requests whose bodies are arriving; further requests get 429."""
    held_bytes: int = 1 << 29
    """Maximum total size in bytes of received bodies that are not answered yet; beyond it, further
    requests get 429."""
    wait_s: float = 0.5
    """Maximum estimated seconds that a request may have to wait for others; beyond it, requests get
    429."""
    lesson_wait_s: float = 5.0
    """The same for examples that must be encoded before they are learnt."""
    part: float = 256.0
    """Maximum work per batch of the model (a batch has at least one item), in tokens to encode. A
    text has at most 256 with the default encoder; answering a query counts as four."""
    part_s: float = 0.1
    """Seconds per batch: the maximum work is raised to what can be done in this time."""
    batch: int = 64
    """Maximum number of items per batch of the model."""
    window_s: float = 0.003
    """Maximum seconds to wait for more items, if the last batch had several."""
    writes: int = 64
    """Maximum number of writes waiting or in progress; further requests get 429."""
    open_paths: tuple[str, ...] = ()
    """Paths of pages with their own login. Their requests may stay open as long as the page is
    open."""
    page_requests: int = 256
    """Maximum number of open requests to these pages, including endless streams; further requests
    get 429."""

    @property
    def requires_token(self) -> bool:
        return self.token is not None or bool(self.tokens)

    def find_token_name(self, given: bytes) -> str | None:
        """Return the name of the token that was given; `None` if it is none of ours.

        It is compared with all of them, so that the time taken reveals nothing.
        """
        known = {**self.tokens, **({} if self.token is None else {UNNAMED_TOKEN: self.token})}
        matching = [
            name for name, token in known.items() if secrets.compare_digest(given, token.encode())
        ]
        return matching[0] if matching else None

    def find_visitor_name(self, user: str, password: str) -> str | None:
        """Return the name of the token with which a visitor logs in; `None` if it is wrong.

        The user name must be the name of the token, or any other for the token without a name.
        """
        name = self.find_token_name(password.encode())
        return name if name == user or (name == UNNAMED_TOKEN and user not in self.tokens) else None

    def name_visitor(self, user: str | None) -> str | None:
        """Return the name of the token of a visitor who has logged in with this user name."""
        if user in self.tokens:
            return user
        return None if self.token is None else UNNAMED_TOKEN


def read_tokens(path: Path) -> dict[str, str]:
    """Read a file of tokens, one per line: the name, white space, the token.

    Empty lines and lines that begin with # are skipped.

    Raises:
        RunError: the file cannot be read or a line is invalid. The message does not repeat tokens.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise RunError(f"{path} cannot be read: {why}") from error
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        name, *rest = line.split() or ["#"]
        if name.startswith("#"):
            continue
        where = f"{path}, line {number}"
        if len(rest) != 1:
            raise RunError(f"{where}: must be a name and a token, separated by white space")
        if name == UNNAMED_TOKEN or name in tokens or len(name) > MAX_TOKEN_NAME_CHARACTERS:
            raise RunError(
                f"{where}: the name must be unique, other than {UNNAMED_TOKEN!r}, and have at most "
                f"{MAX_TOKEN_NAME_CHARACTERS} characters"
            )
        if rest[0] in tokens.values():
            raise RunError(f"{where}: two names must not have the same token")
        tokens[name] = rest[0]
    if not tokens:
        raise RunError(f"{path} has no tokens: write a name and a token on each line")
    return tokens


@dataclass(frozen=True)
class LanguageSettings(Settings):
    """Limits of the service of a language run."""

    waiting_requests: int = 32
    """Maximum number of requests waiting for the model; further requests get 429."""
    waiting_documents: int = 8
    """Maximum number of documents waiting to be learnt; further ones get 429."""
    document_characters: int = 1_000_000
    """Maximum length of a document; longer ones get 413. `mbpa lm read` takes any length."""
    scored_tokens: int = 4096
    """Maximum length of a text to score; longer ones get 400."""
    chat_tokens: int = 512
    """Maximum number of tokens that a chat answer has if the request sets none."""
