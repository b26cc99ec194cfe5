"""Fixtures: a PostgreSQL server for all tests of a process, and an empty database for each."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from reliability.postgres import PostgresMissingError, PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Start a server; skip the test where PostgreSQL cannot be run."""
    try:
        server = PostgresServer()
    except PostgresMissingError as error:
        pytest.skip(f"PostgreSQL cannot be run here: {error}")
    with server:
        yield server


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """Return the address of an empty database."""
    name = f"test_{uuid.uuid4().hex}"
    postgres.execute(f"CREATE DATABASE {name}", database="postgres")
    yield postgres.make_url(database=name)
    postgres.execute(f"DROP DATABASE {name} WITH (FORCE)", database="postgres")
