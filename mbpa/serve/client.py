"""A client of a running service, for commands that take a run directory or a service's URL."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import IO, Any
from urllib.parse import urlencode

from mbpa.errors import RunError

TIMEOUT_S = 3600.0  # to begin an answer, which for training takes minutes
MAX_ERROR_BYTES = 1 << 16
EXAMPLES_PER_PAGE = 1000
POSITION_HEADER = "X-MbPA-Position"  # of an answer, and of requests that must know as much


def is_url(place: str) -> bool:
    """Return whether a command was given a service rather than a directory."""
    return place.startswith(("http://", "https://"))


class ServiceClient:
    """Sends requests to a service.

    Every request to a replica sees at least what the answers before it saw, whichever replica a
    load balancer chooses.

    Args:
        url: address of the service, such as http://127.0.0.1:8000.
        token: its token, if it requires one.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url, self._token = url.rstrip("/"), token
        self._position: str | None = None

    def get(self, path: str, query: Mapping[str, str | int | None] | None = None) -> Any:
        """Return the JSON answer to a GET request; parameters that are `None` are left out."""
        given = {name: value for name, value in (query or {}).items() if value is not None}
        with self._open("GET", f"{path}?{urlencode(given)}" if given else path) as answer:
            return json.load(answer)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON answer to a POST request."""
        with self._open("POST", path, json.dumps(body).encode()) as answer:
            return json.load(answer)

    def download(self, path: str, file: IO[bytes]) -> None:
        """Write the answer to a GET request to a file."""
        with self._open("GET", path) as answer:
            shutil.copyfileobj(answer, file)
            missing = getattr(answer, "length", None)
        if missing:
            raise RunError(f"{self.url}{path}: the answer broke off, {missing} bytes are missing")

    def list_examples(self, query: Mapping[str, str | int | None]) -> Iterator[dict[str, Any]]:
        """Return all examples that a query of /examples matches, page by page."""
        cursor: int | None = None
        while True:
            page = self.get("/examples", {**query, "limit": EXAMPLES_PER_PAGE, "cursor": cursor})
            yield from page["examples"]
            cursor = page["cursor"]
            if cursor is None:
                return

    @contextmanager
    def _open(self, method: str, path: str, body: bytes | None = None) -> Iterator[IO[bytes]]:
        headers = {} if body is None else {"Content-Type": "application/json"}
        if self._position is not None:
            headers[POSITION_HEADER] = self._position
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            request = urllib.request.Request(
                self.url + path, data=body, headers=headers, method=method
            )
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                self._position = answer.headers.get(POSITION_HEADER, self._position)
                yield answer
        except urllib.error.HTTPError as error:
            with error:
                why = _read_error(error)
            if error.code == HTTPStatus.UNAUTHORIZED:
                why = "a valid token is required: pass --token, or set MBPA_TOKEN"
            raise RunError(f"{self.url}{path}: {why}") from error
        except urllib.error.URLError as error:
            raise RunError(f"{self.url} cannot be reached: {error.reason}") from error
        except (OSError, ValueError) as error:
            raise RunError(f"{self.url}{path}: {error}") from error


def _read_error(error: urllib.error.HTTPError) -> str:
    """Return the message of an error response of the service, or else its status."""
    try:
        message = json.loads(error.read(MAX_ERROR_BYTES))["error"]
    except (OSError, ValueError, LookupError, TypeError):
        return f"the service answered {error.code} {error.reason}"
    return str(message)
