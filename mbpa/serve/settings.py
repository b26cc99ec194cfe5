"""Settings of the service: the token, and limits on what it accepts."""

from __future__ import annotations

from dataclasses import dataclass

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

    token: str | None = None
    """Token required for every path except `OPEN_PATHS`; `None`: no token is required."""
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
