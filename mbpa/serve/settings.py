"""Settings of the service: the token, and limits on what it accepts."""

from __future__ import annotations

from dataclasses import dataclass

OPEN_PATHS = (
    "/",
    "/health",
    "/docs",
    "/openapi.json",
    "/favicon.ico",
)  # reveal nothing


@dataclass(frozen=True)
class Settings:
    """Limits of the service."""

    token: str | None = None
    """Asked of every request but those for `OPEN_PATHS`; `None`: of none."""
    body_bytes: int = 8 << 20
    in_flight: int = 128
    """Maximum number of requests that have come in full and are not answered yet; further requests
    get 429."""
    receiving: int = 1024
    """Maximum number of requests whose bodies are on their way; further requests get 429."""
    held_bytes: int = 1 << 29
    """Bytes of bodies that have come and are not answered yet; above it further requests get
    429."""
    wait_s: float = 0.5
    """Estimated seconds that a request may have to wait for others; more get 429."""
    lesson_wait_s: float = 5.0
    """The same for examples that are to be encoded before they are learnt."""
    part: float = 256.0
    """Work that the model gets at a time, at least one item: tokens to encode, of which a text has
    256 at most for the default encoder; a query counts for four."""
    part_s: float = 0.1
    """Or what it does in so many seconds, if that is more."""
    batch: int = 64
    """Maximum number of items that the model gets at a time."""
    window_s: float = 0.003
    """Seconds that items have to gather, when there were several the last time."""
    writes: int = 64
    """Calls that wait to be written down."""
    open_paths: tuple[str, ...] = ()
    """Paths of pages with a login of their own, whose requests may stay open as long as they are
    looked at."""
    page_requests: int = 256
    """Maximum number of requests to these pages that are open at a time, endless streams among
    them; further requests get 429."""
