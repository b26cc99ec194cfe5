"""Numbers in the documents are those of the committed results."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from benchmarks.report import read_reports, refresh_tables
from experiments import cli
from experiments.documents import (
    END_MARKER,
    FIGURES,
    digest_in,
    format_markdown,
    refresh_document,
    render_document,
)
from experiments.errors import ExperimentError
from experiments.sections import Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = "<!-- results: illustration paper: Error where nothing was seen -->\n"
FIGURE = "<!-- results: illustration paper: illustration -->\n"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_number_is_stale(path: Path) -> None:
    text = path.read_text("utf-8")
    document = render_document(text, RESULTS)
    assert document.text == text, f"{path.name} is stale: run `make docs`"
    for name, (_, told) in document.figures.items():
        assert digest_in(path.parent / FIGURES / name) == told, f"{name} is stale: run `make docs`"


def test_the_tables_of_the_engine_are_those_of_the_benchmarks() -> None:
    page = (ROOT / "docs" / "engine.md").read_text("utf-8")
    found = read_reports(RESULTS / "benchmarks")
    assert sum(f"<!-- benchmarks: {device} -->" in page for device in found) == 2
    assert refresh_tables(page, found) == page, "run `python -m benchmarks.report`"


def test_a_changed_number_is_noticed_and_mended(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        f"Before.\n\n{TABLE}{END_MARKER}\n\nBetween.\n\n{FIGURE}{END_MARKER}\n\nAfter.\n"
    )
    assert refresh_document(path, RESULTS)
    fresh = path.read_text()
    picture = (tmp_path / FIGURES / "illustration-paper.png").read_bytes()
    assert "| MbPA | " in fresh
    assert fresh.endswith(f"(figures/illustration-paper.png)\n{END_MARKER}\n\nAfter.\n")
    assert not refresh_document(path, RESULTS)
    path.write_text(fresh.replace("| MbPA | 0.0", "| MbPA | 0.1"))
    (tmp_path / FIGURES / "illustration-paper.png").write_bytes(picture[:-20])
    assert refresh_document(path, RESULTS)
    assert path.read_text() == fresh


def test_a_table_may_be_shown_in_part() -> None:
    whole = render_document(f"{TABLE}{END_MARKER}\n", RESULTS).text.splitlines()
    begin = TABLE.replace(" -->", " | MbPA | attention -->")
    part = render_document(f"{begin}{END_MARKER}\n", RESULTS).text.splitlines()
    (left_out,) = [line for line in whole if line.startswith("| parametric |")]
    assert part[1:] == [line for line in whole[1:] if line != left_out]


@pytest.mark.heavy
def test_a_figure_of_other_results_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"{FIGURE}{END_MARKER}\n")
    refresh_document(path, RESULTS)
    picture = tmp_path / FIGURES / "illustration-paper.png"
    now = digest_in(picture)
    picture.write_bytes(picture.read_bytes().replace(now.encode(), b"0123456789abcdef"))
    assert refresh_document(path, RESULTS)
    assert digest_in(picture) == now
    assert digest_in(tmp_path / "none.png") is None


def test_a_figure_that_other_code_drew_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = render_document(f"{FIGURE}{END_MARKER}\n", RESULTS).figures
    monkeypatch.setattr(inspect, "getsource", lambda module: f"{module.__name__} of tomorrow")
    for name, (_, told) in render_document(f"{FIGURE}{END_MARKER}\n", RESULTS).figures.items():
        assert told != now[name][1]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("illustration paper: No such table", "shows no 'No such table': name one of Error where"),
        (
            "illustration paper: Error where nothing was seen | none",
            "has no row 'none': .*MbPA",
        ),
        ("illustration smoke: Any", "holds no results of illustration smoke"),
        ("no-such paper: Any", "no experiment is called 'no-such'"),
    ],
)
def test_a_block_that_cannot_be_filled_says_why(asked: str, why: str) -> None:
    with pytest.raises(ExperimentError, match=why):
        render_document(f"<!-- results: {asked} -->\n{END_MARKER}\n", RESULTS)


@pytest.mark.parametrize(
    "text",
    [
        f"{TABLE}\nA block without an end.\n\n{TABLE}{END_MARKER}\n",
        f"{TABLE.replace('results:', 'result:')}{END_MARKER}\n",
        f"{TABLE.replace(' -->', '-->')}{END_MARKER}\n",
        f"{TABLE.replace('-->', '--> ')}{END_MARKER}\n",
        f"{TABLE.replace('paper:', 'paper')}{END_MARKER}\n",
        f"{TABLE}",
        f"{END_MARKER}\n",
    ],
)
def test_a_marker_that_is_not_quite_one_is_refused(text: str) -> None:
    with pytest.raises(ExperimentError, match="a block of results must be"):
        render_document(text, RESULTS)


def test_the_command_tells_what_was_stale(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"{TABLE}{END_MARKER}\n")
    words = ["report", str(RESULTS), "--documents", str(path)]
    assert cli.main(words) == 0
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"{path} updated\n{path} is up to date\n"


def test_a_table_keeps_its_bars_and_its_note() -> None:
    table = Table("A title", ["name", "value"], [["a|b", "1.5"]], "A note.")
    assert (
        format_markdown(table) == "| name | value |\n| --- | ---: |\n| a\\|b | 1.5 |\n\n*A note.*\n"
    )


def test_what_looks_like_a_tag_in_a_table_is_not_one() -> None:
    table = Table("A title", ["word"], [["<unk> a\\/b"], ["`<unk>|` <a"], ["`` the <unk> ''"]])
    assert format_markdown(table).splitlines()[2:] == [
        "| \\<unk> a\\\\/b |",
        "| `<unk>\\|` \\<a |",
        "| `` the \\<unk> '' |",
    ]
