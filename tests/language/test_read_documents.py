"""Documents are found in order and read as text; what has no text is refused with a reason."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from mbpa.language.documents import DocumentError, find_documents, read_document


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    names = ["b.txt", "a.md", "c.png", ".hidden.md", "sub/d.RST", "sub/.git/e.txt", "sub/f.html"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("some text", encoding="utf-8")
    return tmp_path


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# Finding


def test_folders_are_searched_in_order_for_documents_that_are_not_hidden(tree: Path) -> None:
    found = [path.relative_to(tree).as_posix() for path in find_documents([tree])]
    assert found == ["a.md", "b.txt", "sub/d.RST", "sub/f.html"]


def test_a_file_given_by_name_is_taken_whatever_it_is_called_and_only_once(tree: Path) -> None:
    found = find_documents([tree / "c.png", str(tree / "b.txt"), tree])
    assert [path.name for path in found] == ["c.png", "b.txt", "a.md", "d.RST", "f.html"]
    assert find_documents(tree / ".hidden.md") == [tree / ".hidden.md"]


def test_a_hidden_folder_given_by_name_is_searched(tree: Path) -> None:
    assert find_documents(str(tree / "sub" / ".git")) == [tree / "sub" / ".git" / "e.txt"]


def test_links_in_folders_lead_to_files_but_not_in_circles(tree: Path) -> None:
    (tree / "sub" / "circle").symlink_to(tree)
    (tree / "sub" / "broken.txt").symlink_to(tree / "nothing")
    (tree / "sub" / "link.txt").symlink_to(tree / "b.txt")
    names = [path.name for path in find_documents([tree])]
    assert names == ["a.md", "b.txt", "d.RST", "f.html", "link.txt"]


def test_a_missing_path_is_an_error(tree: Path) -> None:
    with pytest.raises(DocumentError, match=r"must be an existing file or folder, got .*nothing"):
        find_documents([tree, tree / "nothing"])


# Text


def test_text_is_unchanged_but_for_line_ends_and_the_byte_order_mark(tmp_path: Path) -> None:
    text = "# Café 東京\u00a0\n\n  indented\t \u2028last\n"
    content = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    for name in ("a.txt", "a.md", "a.rst", "a.py", "README"):
        assert read_document(write(tmp_path, name, content)) == text
    assert read_document(write(tmp_path, "old.txt", "one\rtwo\r\nthree\r")) == "one\ntwo\nthree\n"


@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.pdf", "a"])
def test_empty_files_are_refused(tmp_path: Path, name: str) -> None:
    for content in ("", " \r\n\t "):
        with pytest.raises(DocumentError, match=r"must (contain text|be a readable PDF), got"):
            read_document(write(tmp_path, name, content))


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n", b"text\0text", "é".encode("latin-1")])
@pytest.mark.parametrize("name", ["a.txt", "a.html"])
def test_binary_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(DocumentError, match="must be UTF-8 text, got"):
        read_document(write(tmp_path, name, content))


def test_large_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "12345")
    assert read_document(path, max_bytes=5) == "12345"
    with pytest.raises(DocumentError, match="must have at most 4 bytes, got more"):
        read_document(path, max_bytes=4)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for name in ("pipe.txt", "."):
        with pytest.raises(DocumentError, match="must be a regular file"):
            read_document(tmp_path / name)
    with pytest.raises(DocumentError, match="must be readable, got: No such file"):
        read_document(tmp_path / "nothing.txt")
    assert find_documents(tmp_path) == []


# HTML

PAGE = """<!DOCTYPE html><html><head><title>Title</title><style>p { color: red }</style>
<script>if (a < b) { document.write("<p>written</p>") }</script></head>
<body><nav><ul><li>Home</ul></nav><div role="navigation">up <div>next</div></div>
<h1>Opening  a
file<a class="headerlink" href="#x">¶</a></h1>
<p>Call <code>open()</code>, then&nbsp;read &lt;it&gt; &amp; close&#33;<br>Second <b>bo</b>ld line
<p>Unclosed paragraph
<ul><li>one<li>two</ul>
<p hidden>not seen
<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>
<pre>
def f():
    return  1

f()</pre><!-- a comment --><p aria-hidden="true">icon</p>end
<input hidden>of page</body></html>
"""


def test_html_is_reduced_to_its_visible_text(tmp_path: Path) -> None:
    expected = [
        "Opening a file",
        "Call open(), then\u00a0read <it> & close!",
        "Second bold line",
        "Unclosed paragraph",
        "one",
        "two",
        "a b",
        "1 2",
        "",
        "def f():",
        "    return  1",
        "",
        "f()",
        "end of page",
    ]
    assert read_document(write(tmp_path, "a.html", PAGE)).split("\n") == expected
    windows = PAGE.replace("\n", "\r\n")
    assert read_document(write(tmp_path, "b.HTM", windows)).split("\n") == expected


def test_html_may_declare_another_encoding(tmp_path: Path) -> None:
    page = '<meta charset="{}"><p>café “quoted”'
    for encoding, codec in (("windows-1252", "cp1252"), ("ISO-8859-1", "cp1252"), ("gbk", "gbk")):
        path = write(tmp_path, "a.html", page.format(encoding).encode(codec, "replace"))
        assert read_document(path) == "café “quoted”".encode(codec, "replace").decode(codec)
    with pytest.raises(DocumentError, match="must be UTF-8 text"):
        read_document(
            write(tmp_path, "b.html", page.format("nonsense").encode("latin-1", "replace"))
        )


def test_html_without_visible_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="must contain text, got none"):
        read_document(write(tmp_path, "a.html", "<title>x</title><script>y</script><nav>z</nav>"))


def test_hostile_html_takes_linear_time(tmp_path: Path) -> None:
    nested = "<div>" * 20_000 + "deep" + "</p></b>" * 20_000
    assert read_document(write(tmp_path, "a.html", nested)) == "deep"


# PDF


def make_pdf(*lines: str) -> bytes:
    """Return a PDF with one page per line of text; an empty line makes an empty page."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>"]
    pages = [4 + 2 * i for i in range(len(lines))]
    kids = " ".join(f"{page} 0 R" for page in pages)
    objects.append(f"<< /Type /Pages /Count {len(lines)} /Kids [{kids}] >>")
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for page, line in zip(pages, lines, strict=True):
        stream = f"BT /F1 12 Tf 72 720 Td ({line}) Tj ET" if line else ""
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {page + 1} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    body, offsets = "%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    trailer = f"trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{len(body)}\n%%EOF\n"
    return f"{body}xref\n0 {size}\n0000000000 65535 f \n{table}{trailer}".encode("latin-1")


def encrypt(content: bytes, password: str) -> bytes:
    pypdf = pytest.importorskip("pypdf")
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(content))
    writer.encrypt(password, "owner", algorithm="RC4-128")
    target = io.BytesIO()
    writer.write(target)
    return target.getvalue()


def test_a_pdf_is_read_page_by_page(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    path = write(tmp_path, "a.pdf", make_pdf("To open a file", "", "The last page"))
    assert read_document(path).split("\n") == ["To open a file", "", "The last page"]
    with pytest.raises(DocumentError, match="must have at most"):
        read_document(path, max_bytes=100)


def test_a_pdf_without_text_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    with pytest.raises(DocumentError, match=r"must contain text, got a PDF without any"):
        read_document(write(tmp_path, "a.pdf", make_pdf("", "")))


def test_a_pdf_is_read_if_its_password_is_empty_and_refused_otherwise(tmp_path: Path) -> None:
    content = make_pdf("For your eyes")
    assert read_document(write(tmp_path, "a.pdf", encrypt(content, ""))) == "For your eyes"
    with pytest.raises(DocumentError, match="must not be encrypted"):
        read_document(write(tmp_path, "b.pdf", encrypt(content, "secret")))


def test_damaged_pdfs_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    content = make_pdf("text")
    for damaged in (b"not a PDF", content[:9], content[: len(content) // 4]):
        with pytest.raises(DocumentError, match=r"must (be a readable PDF|contain text), got"):
            read_document(write(tmp_path, "a.pdf", damaged))
