"""The command line as users see it: through `main`, or in a process of its own where it matters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mbpa
from mbpa import cli
from mbpa.cli.command import Command, run_command

ROOT = Path(mbpa.__file__).parents[1]


def test_help_names_the_commands(capsys):
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    named = ",".join(cli.COMMANDS)
    assert f"usage: mbpa [-h] {{{named}}}" in " ".join(printed.split())
    assert "mbpa --version" in printed


def test_help_of_demo_describes_its_options(capsys):
    assert cli.main(["demo", "--help"]) == 0
    printed = capsys.readouterr().out
    for option in ("--out", "--seeds", "--progress"):
        assert option in printed
    assert "Directory for the files" in printed


def test_help_of_serve_says_what_the_token_is_for(capsys):
    assert cli.main(["serve", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Requests must then carry the header `Authorization: Bearer TOKEN`" in printed
    assert "environment variable MBPA_TOKEN" in printed


@pytest.mark.parametrize("command", ["serve", "explore"])
def test_an_empty_token_is_refused(command, tmp_path, capsys):
    assert cli.main([command, str(tmp_path), "--token", ""]) == 2
    assert "--token must not be empty" in capsys.readouterr().err


def test_a_file_is_refused_as_a_run(tmp_path, capsys):
    (tmp_path / "intents.csv").write_text("text,label\n")
    assert cli.main(["serve", str(tmp_path / "intents.csv")]) == 2
    assert "intents.csv is not a run" in capsys.readouterr().err


@pytest.mark.heavy
def test_help_imports_neither_images_nor_plots_nor_experiments():
    calls = "".join(f"main([{word!r}, '--help']); " for word in cli.COMMANDS)
    check = "assert not {'sklearn', 'matplotlib', 'PIL', 'experiments'} & set(sys.modules)"
    code = f"import sys; from mbpa.cli import main; {calls}{check}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mbpa {mbpa.__version__}\n"


def test_no_arguments_print_help(capsys):
    assert cli.main([]) == 0
    assert "usage: mbpa" in capsys.readouterr().out


@pytest.mark.parametrize("word", cli.COMMANDS)
def test_every_command_has_help(word, capsys):
    assert cli.main([word, "--help"]) == 0
    assert f"usage: mbpa {word}" in capsys.readouterr().out


def test_an_unknown_command_is_an_error_that_names_the_known_ones(capsys):
    assert cli.main(["dream"]) == 2
    printed = capsys.readouterr()
    assert "dream" in printed.err
    assert "demo" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("seeds", ["0", "101"])
def test_seeds_out_of_range_are_an_error(seeds, capsys):
    assert cli.main(["demo", "--seeds", seeds]) == 2
    assert f"seeds must be between 1 and 100, got {seeds}" in capsys.readouterr().err


@pytest.mark.heavy
def test_demo_prints_a_table_and_says_where_its_files_are(tmp_path, capsys):
    out = tmp_path / "new" / "directory"
    assert cli.main(["demo", "--out", str(out), "--seeds", "1"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert "kernel vote" in printed.out
    assert lines[-2:] == [f"figure  {out / 'demo.png'}", f"records {out / 'demo.json'}"]
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "demo.json").read_text())["config"]["seeds"] == [0]
    assert "8000" not in printed.err
    assert "400/400" in printed.err


def test_an_out_that_is_a_file_gives_a_one_line_error(tmp_path, capsys):
    (tmp_path / "demo").write_text("mine")
    assert cli.main(["demo", "--out", str(tmp_path / "demo")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "mbpa: out must be a directory that can be written to, "
        f"got {tmp_path / 'demo'}: File exists"
    ]
    assert (tmp_path / "demo").read_text() == "mine"


def test_an_out_below_a_file_gives_a_one_line_error(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "demo")]) == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert "out must be a directory that can be written to" in printed


@pytest.mark.parametrize(
    ("module", "package"),
    [("sklearn.datasets", "scikit-learn"), ("matplotlib.figure", "matplotlib")],
)
def test_a_missing_package_gives_one_line_that_names_the_extra(
    module, package, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["demo", "--out", str(tmp_path), "--no-progress"]) == 1
    said = capsys.readouterr().err
    assert said == f"mbpa: {package} is not installed: pip install 'mbpa[demo]'\n"


class Interrupted(Command):
    def run(self) -> int:
        raise KeyboardInterrupt


class Resumable(Interrupted):
    after_interrupt = "run it again"


@pytest.mark.parametrize(
    ("command", "said"),
    [(Interrupted(), "interrupted"), (Resumable(), "interrupted; run it again")],
)
def test_an_interrupt_prints_one_line(command, said, capsys):
    assert run_command(lambda: command, program="mbpa") == 130
    assert capsys.readouterr().err == f"mbpa: {said}\n"


@pytest.mark.heavy
def test_closing_the_output_early_is_no_error() -> None:
    command = [sys.executable, "-m", "mbpa.cli", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1
