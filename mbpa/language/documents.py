"""Finding documents on disk and reading their text: plain text, Markdown, HTML and PDF.

Text is taken as it stands. Only the byte order mark is removed, and every line ends in one newline.
A file that has no text to offer raises `DocumentError`, so that a caller can skip it and go on.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

from mbpa.errors import MissingExtraError

MAX_DOCUMENT_BYTES = 1 << 27
"""Largest file that is read, 128 MiB; the text of a PDF may not be longer than that either."""
SUFFIXES = frozenset({".txt", ".md", ".rst", ".html", ".htm", ".pdf"})
"""Suffixes, in lower case, of the files that `find_documents` looks for in folders."""
_CHARSET_BYTES = 1024  # where HTML has to declare its encoding


class DocumentError(ValueError):
    """A document cannot be read: it is missing, empty, binary, encrypted, or too large."""


def find_documents(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the documents among these files and inside these folders, each of them once.

    Args:
        paths: files and folders. A file is returned whatever its suffix. A folder is searched
            recursively for files with one of `SUFFIXES`, in alphabetical order. Files and folders
            whose name begins with a dot are skipped there, links to folders are not followed.

    Raises:
        DocumentError: a path does not exist, or a folder cannot be read.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    found: dict[Path, None] = {}
    for path in map(Path, given):
        if path.is_dir():
            found |= dict.fromkeys(_walk(path))
        elif path.exists():
            found[path] = None
        else:
            raise DocumentError(f"a document must be an existing file or folder, got {path}")
    return list(found)


def read_document(path: str | os.PathLike[str], *, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """Return the text of a document, with line ends as newlines and without a byte order mark.

    HTML is reduced to its visible text: no scripts, styles or navigation; block elements become
    lines. Of a PDF, the text of its pages is returned. Any other file must be UTF-8 text.

    Args:
        path: a file. The suffixes ``.html``, ``.htm`` and ``.pdf`` select how it is read.
        max_bytes: size of the largest file that is read.

    Raises:
        DocumentError: the file is missing, empty, too large, not UTF-8 text, an encrypted or
            damaged PDF, or has no text.
        MissingExtraError: the file is a PDF, and pypdf is not installed.
    """
    path = Path(path)
    content = _read_bytes(path, max_bytes)
    suffix = path.suffix.lower()
    if suffix == ".pdf":
        text = _extract_pdf(path, content, max_bytes)
    elif suffix in {".html", ".htm"}:
        text = _extract_html(_decode_html(path, content))
    else:
        text = _decode(path, content)
    if not text.strip():
        raise DocumentError(f"{path}: must contain text, got {_describe_empty(suffix, content)}")
    return _unify_line_ends(text)


# Files


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise DocumentError(f"{error.filename}: must be readable, got: {error.strerror}") from error

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.suffix.lower() in SUFFIXES and path.is_file():
                yield path


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block forever
            raise DocumentError(f"{path}: must be a regular file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise DocumentError(f"{path}: must be readable, got: {error.strerror or error}") from error
    if len(content) > max_bytes:
        raise DocumentError(f"{path}: must have at most {max_bytes:,} bytes, got more")
    return content


def _describe_empty(suffix: str, content: bytes) -> str:
    if not content.strip():
        return "an empty file"
    return "a PDF without any (scanned pages?)" if suffix == ".pdf" else "none"


# Text


def _unify_line_ends(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decode(path: Path, content: bytes) -> str:
    if b"\0" in content:
        raise DocumentError(f"{path}: must be UTF-8 text, got binary data")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{path}: must be UTF-8 text, got other data at byte {error.start:,}"
        ) from error


def _decode_html(path: Path, content: bytes) -> str:
    """Decode HTML as UTF-8, or else in the encoding that it declares."""
    try:
        return _decode(path, content)
    except DocumentError:
        declared = re.search(rb"charset\s*=\s*[\"']?([\w.:-]+)", content[:_CHARSET_BYTES])
        if declared is None or b"\0" in content:
            raise
        try:
            encoding = codecs.lookup(declared[1].decode("ascii", "replace")).name
            # Browsers read Latin-1 as the Windows code page that contains it.
            return content.decode("cp1252" if encoding == "iso8859-1" else encoding, "replace")
        except (LookupError, UnicodeError):
            pass
        raise


# PDF


def _extract_pdf(path: Path, content: bytes, max_bytes: int) -> str:
    try:
        import pypdf
        from pypdf.errors import DependencyError, FileNotDecryptedError
    except ImportError as error:
        raise MissingExtraError("pypdf", extra="language") from error

    pages: list[str] = []
    length = 0
    try:
        for page in pypdf.PdfReader(io.BytesIO(content)).pages:
            pages.append(page.extract_text())
            length += len(pages[-1])
            if length > max_bytes:
                raise DocumentError(f"{path}: must have at most {max_bytes:,} characters, got more")
    except (DocumentError, MemoryError):
        raise
    except (FileNotDecryptedError, DependencyError) as error:
        raise DocumentError(f"{path}: must not be encrypted, got an encrypted PDF") from error
    except Exception as error:  # a damaged file makes pypdf raise almost anything
        raise DocumentError(f"{path}: must be a readable PDF, got: {error}") from error
    # Damaged character maps yield halves of surrogate pairs, which no tokenizer accepts.
    joined = "\n".join(pages)
    return joined.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# HTML

_HIDDEN = frozenset({
    "audio", "button", "canvas", "datalist", "iframe", "math", "nav", "noscript", "object",
    "script", "select", "style", "svg", "template", "textarea", "title", "video",
})  # fmt: skip
_HIDDEN_ROLES = frozenset({"navigation", "search", "menu", "menubar", "toolbar"})
_HIDDEN_CLASSES = frozenset({"headerlink"})  # the pilcrow that Sphinx and MkDocs put after headings
_VOID = frozenset({
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source",
    "track", "wbr",
})  # fmt: skip
_BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "br", "caption", "center", "dd", "details",
    "dialog", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2",
    "h3", "h4", "h5", "h6", "header", "hgroup", "hr", "html", "legend", "li", "main", "menu", "nav",
    "ol", "p", "pre", "section", "summary", "table", "tbody", "tfoot", "thead", "tr", "ul",
})  # fmt: skip
_CELLS = frozenset({"td", "th"})
# An element on the left, if it is still open, ends where one on the right begins.
_ENDED_BY = {
    "p": _BLOCKS - {"br"},
    "li": frozenset({"li"}),
    "dt": frozenset({"dt", "dd"}),
    "dd": frozenset({"dt", "dd"}),
    "td": frozenset({"td", "th", "tr"}),
    "th": frozenset({"td", "th", "tr"}),
    "tr": frozenset({"tr"}),
}
_SPACES = re.compile(r"[ \t\n\f]+")  # HTML's own whitespace; other spaces are characters


def _extract_html(markup: str) -> str:
    parser = _VisibleText()
    parser.feed(_unify_line_ends(markup))
    parser.close()
    return parser.join_lines()


class _VisibleText(HTMLParser):
    """Collects the visible text of a page, one line per block element."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[tuple[str, bool]] = []  # the open elements, and whether each is hidden
        self._count: Counter[str] = Counter()  # open elements by tag
        self._hidden = 0  # number of open elements that are hidden
        self._lines: list[str] = []
        self._line: list[str] = []  # non-empty pieces of the line that is being collected

    def join_lines(self) -> str:
        """Return what has been collected."""
        self._end_line()
        return "\n".join(self._lines)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        while self._open and tag in _ENDED_BY.get(self._open[-1][0], ()):
            self._pop()
        self._separate(tag)
        if tag in _VOID:
            return
        hidden = tag in _HIDDEN or _is_hidden(dict(attrs))
        self._open.append((tag, hidden))
        self._count[tag] += 1
        self._hidden += hidden

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag in {"svg", "math"}:  # HTML ignores the slash everywhere else
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._count[tag] and self._pop() != tag:
            pass
        self._separate(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if self._count["pre"]:
            first, *others = data.split("\n")
            self._append(first)
            for line in others:
                self._end_line(keep_empty=True)
                self._append(line)
        else:
            text = _SPACES.sub(" ", data)
            self._append(text.lstrip(" ") if self._is_spaced() else text)

    def _pop(self) -> str:
        tag, hidden = self._open.pop()
        self._count[tag] -= 1
        self._hidden -= hidden
        return tag

    def _separate(self, tag: str) -> None:
        if self._hidden:
            return
        if tag in _BLOCKS:
            self._end_line()
        elif tag in _CELLS and not self._is_spaced():
            self._append(" ")

    def _is_spaced(self) -> bool:
        """Return whether further space would be at the start of a line or after other space."""
        return not self._line or self._line[-1].endswith(" ")

    def _append(self, text: str) -> None:
        if text:
            self._line.append(text)

    def _end_line(self, *, keep_empty: bool = False) -> None:
        line = "".join(self._line).rstrip(" ")
        self._line.clear()
        if line or keep_empty:
            self._lines.append(line)


def _is_hidden(attributes: dict[str, str | None]) -> bool:
    return (
        "hidden" in attributes
        or attributes.get("aria-hidden") == "true"
        or (attributes.get("role") or "").strip().lower() in _HIDDEN_ROLES
        or not _HIDDEN_CLASSES.isdisjoint((attributes.get("class") or "").split())
    )
