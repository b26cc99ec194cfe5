"""The commands that use a run: `mbpa serve`, `mbpa explore` and `mbpa check`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from mbpa.cli.command import Command
from mbpa.errors import CheckpointError, MissingExtraError, RunError


@dataclass(frozen=True)
class Serve(Command):
    """Serve a run over HTTP. The API is documented at /docs.

    A classifier predicts, learns, explains and forgets. A language run speaks OpenAI's protocol,
    and learns and forgets documents.
    """

    directory: tyro.conf.Positional[Path]
    """Run directory written by `mbpa teach` or `mbpa lm read`.
    Or a model that `MbPA.save` wrote: what it is taught is kept in the run DIRECTORY/run."""
    host: str = "127.0.0.1"
    """Address to listen on. Use 0.0.0.0 for all interfaces, and then set a token."""
    port: int = 8000
    """Port to listen on. With 0 a free port is chosen and printed."""
    token: str | None = None
    """Password of your choice.
    Requests must then carry the header `Authorization: Bearer TOKEN`, except for /health and /docs.
    The page asks for the password.
    The default is the environment variable MBPA_TOKEN, which does not appear in process lists.
    If neither is set, no password is required."""
    tokens: Path | None = None
    """File of named tokens: on each line a name, white space, and the token.
    Each is as good as the password. The audit trail then says whose token was used."""
    threshold: float | None = None
    """Confidence below which the classifier abstains; by default the one chosen by `mbpa teach`.
    Not for language runs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto uses a GPU if there is one."""
    encoder: str | None = None
    """MODULE:FUNCTION for an encoder of your own, if the run was made with one or is a saved model.
    The function returns an `Encoder`, or a function from a list of texts or pictures to keys.
    Modules are found in the working directory first, as `python -m` finds them."""
    takes: Literal["texts", "images"] | None = None
    """What the encoder of a saved model takes; texts by default."""
    labels: Path | None = None
    """File with the names of a saved model's labels, one per line; by default 0, 1 and so on."""
    database: str | None = None
    """Address of a PostgreSQL database to which `mbpa journal copy` has copied the run.
    Any number of replicas can then serve it; what one of them is taught, all know.
    The default is the environment variable MBPA_DATABASE, which does not appear in process lists.
    Not for language runs."""

    def run(self) -> int:
        from mbpa.serve import server
        from mbpa.serve.settings import Settings

        encoder = self._import_encoder()
        server.serve(
            self._find_run(encoder),
            host=self.host,
            port=self.port,
            settings=Settings(token=self._get_token(), tokens=self._read_tokens()),
            threshold=self.threshold,
            device=self.device,
            encoder=encoder,
            database=self._get_database(),
        )
        return 0

    def _get_database(self) -> str | None:
        return self.database or os.environ.get("MBPA_DATABASE") or None

    def _import_encoder(self) -> Any:
        """Return the user's own encoder, if any."""
        from mbpa.encoders import own

        if self.encoder is None:
            return None
        if not own.is_own_encoder(self.encoder):
            raise RunError(f"--encoder must be MODULE:FUNCTION, got {self.encoder!r}")
        try:
            return own.import_encoder(self.encoder)
        except ValueError as error:
            raise RunError(str(error)) from error

    def _find_run(self, encoder: Any) -> Path:
        """Return the run to serve; make one if the directory holds a saved model."""
        from mbpa.serve import own_model

        if own_model.is_saved_model(self.directory):
            return own_model.make_run_of_saved(
                self.directory, encoder=encoder, takes=self.takes, labels=self._read_labels()
            )
        if self.takes is not None or self.labels is not None:
            raise RunError("--takes and --labels are for models that `MbPA.save` wrote")
        return self.directory

    def _read_labels(self) -> list[str] | None:
        if self.labels is None:
            return None
        try:
            return self.labels.read_text("utf-8-sig").splitlines()
        except OSError as error:
            raise RunError(
                f"--labels must name a file with one label per line, in the order of the head's "
                f"outputs, got {self.labels}: {error.strerror}"
            ) from error
        except ValueError as error:
            raise RunError(f"{self.labels} must be text in UTF-8: {error}") from error

    def _read_tokens(self) -> dict[str, str]:
        from mbpa.serve.settings import read_tokens

        return {} if self.tokens is None else read_tokens(self.tokens)

    def _get_token(self) -> str | None:
        """Return the token, if any, and refuse an empty one.

        An empty option usually comes from an unset shell variable, and would let everybody in.
        """
        if self.token == "":
            raise RunError("--token must not be empty; omit it to require no token")
        return self.token or os.environ.get("MBPA_TOKEN") or None


@dataclass(frozen=True)
class Explore(Serve):
    """Serve a run with a web page: ask, see why, teach, undo, and review the examples."""

    def run(self) -> int:
        from mbpa.language.run_directory import is_language_run

        if is_language_run(self.directory):
            return super().run()  # its page needs nothing more
        try:
            from mbpa.explorer import page
            from mbpa.serve import server
            from mbpa.serve.settings import Settings
        except MissingExtraError as error:
            raise MissingExtraError("the page", extra="explore") from error

        encoder = self._import_encoder()
        server.serve(
            self._find_run(encoder),
            host=self.host,
            port=self.port,
            settings=Settings(
                token=self._get_token(), tokens=self._read_tokens(), open_paths=(page.PATH,)
            ),
            threshold=self.threshold,
            device=self.device,
            encoder=encoder,
            database=self._get_database(),
            page=page.mount,
            path=page.PATH,
        )
        return 0


@dataclass(frozen=True)
class Check(Command):
    """Verify the checksums of a run, and that its files belong together.

    Changes nothing. A run is also verified whenever it is served.
    """

    directory: tyro.conf.Positional[Path]
    """Run directory written by `mbpa teach` or `mbpa lm read`."""
    database: str | None = None
    """Address of the PostgreSQL database that holds the run, to verify in place of the directory.
    Also lists the replicas that are connected, and how far they are."""

    def run(self) -> int:
        from mbpa.language.run_directory import is_language_run

        if self.database is not None:
            return self._check_database(self.database)

        if is_language_run(self.directory):
            return self._check_documents()
        from mbpa.serve.verification import check_run

        for name, what in check_run(self.directory):
            print(f"{name:10} {what}")
        print(f"{self.directory} is intact")
        return 0

    def _check_database(self, url: str) -> int:
        from mbpa.serve.journal import JournalError
        from mbpa.serve.postgres_verification import check_database

        try:
            for name, what in check_database(url, self.directory):
                print(f"{name:10} {what}")
        except JournalError as error:
            raise RunError(str(error)) from error
        print("the run in the database is intact")
        return 0

    def _check_documents(self) -> int:
        from mbpa.language.run_directory import RunDirectory

        documents = tokens = 0
        try:
            for source in RunDirectory(self.directory, writable=False).load():
                documents, tokens = documents + 1, tokens + len(source.tokens)
        except CheckpointError as error:
            raise RunError(str(error)) from error
        print(f"{self.directory} is intact: {documents} documents, {tokens} tokens")
        return 0
