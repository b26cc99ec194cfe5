"""What is released: the files of the wheel, its extras, and the workflows that publish it."""

from __future__ import annotations

import ast
import email
import importlib.util
import re
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import mbpa

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release_check = load_script(ROOT / "scripts" / "release_check.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the source distribution."""
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    out = tmp_path_factory.mktemp("dist")
    for builder in (WheelBuilder, SdistBuilder):
        list(builder(str(ROOT)).build(directory=str(out)))
    return out


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"mbpa-{mbpa.__version__}-py3-none-any.whl"
    release_check.check_wheel(wheel)
    expected = release_check.list_package_files()
    assert {"mbpa/py.typed", "mbpa/serve/language_page/index.html"} <= expected
    assert {name.split("/")[0] for name in expected} == {"mbpa", "mbpa_command.py"}


def test_the_sdist_holds_what_builds_the_wheel(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    release_check.check_sdist(sdist)


def test_the_description_has_no_links_that_need_the_repository(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = str(metadata.get_payload(decode=True), "utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    for line in re.findall(r"^(?:#+ .*|\$ .*|\| .*)$", readme, re.MULTILINE):
        assert re.sub(r"\]\(.*?\)|\[", "", line) in re.sub(r"\]\(.*?\)|\[", "", description), line
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert [each for each in links if not each.startswith(("https://", "#"))] == []


def test_a_known_repository_makes_images_and_links_absolute() -> None:
    describe = load_script(ROOT / "scripts" / "package_description.py").describe_package
    readme = (
        "[guide](docs/guide.md#saving), [paper](https://arxiv.org)\n\n"
        "![a\nplot](docs/demo.png)\n\n*A plot.*\n\nEnd.\n"
    )
    assert describe(readme, "https://forge.example/mbpa/", "v1.2.3") == (
        "[guide](https://forge.example/mbpa/blob/v1.2.3/docs/guide.md#saving), "
        "[paper](https://arxiv.org)\n\n"
        "![a\nplot](https://forge.example/mbpa/raw/v1.2.3/docs/demo.png)\n\n*A plot.*\n\nEnd.\n"
    )
    assert describe(readme, None, "v1.2.3") == "guide, [paper](https://arxiv.org)\n\nEnd.\n"


INSTALLS_CHECKOUT = re.compile(r"pip install\b[^`#&]*?[\s']\.(?:\[|\s|$|`)")


def test_a_checkout_is_always_installed_with_the_constraints() -> None:
    lines = [
        (path.name, line)
        for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
        for line in path.read_text("utf-8").splitlines()
        if INSTALLS_CHECKOUT.search(line)
    ]
    assert len(lines) >= 25
    assert [each for each in lines if "install -c constraints.txt" not in each[1]] == []


def list_named_extras() -> set[tuple[str, str]]:
    """Return each file that raises `MissingExtraError` or asks for transformers, and the extra."""
    found = set()
    for folder in ("mbpa", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name not in ("MissingExtraError", "find_model", "import_transformers"):
                    continue
                given = [each.value for each in node.keywords if each.arg == "extra"]
                if name == "MissingExtraError" and not given:
                    given = node.args[1:2]
                for each in given:
                    if isinstance(each, ast.Constant):
                        found.add((path.relative_to(ROOT).as_posix(), str(each.value)))
                    elif name == "MissingExtraError":  # `extra=extra`: the callers are found, too
                        assert isinstance(each, ast.Name), ast.dump(node)
    return found


def test_errors_name_extras_that_exist() -> None:
    named = list_named_extras()
    assert len({extra for _, extra in named}) >= 9
    for path, extra in named:
        assert extra in PROJECT["optional-dependencies"], f"{path} names {extra}"


def test_every_extra_has_a_trial() -> None:
    trials = load_script(ROOT / "tests" / "release" / "smoke.py").TRIALS
    assert set(trials) == {*PROJECT["optional-dependencies"], "none"}


def test_documents_name_extras_that_exist() -> None:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for names in re.findall(r"(?:\.|\bmbpa)\[([a-z,]+)\]'", path.read_text("utf-8")):
            assert set(names.split(",")) <= set(PROJECT["optional-dependencies"]), path.name


def test_each_version_of_python_that_is_claimed_is_allowed() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    claimed = [each for each in PROJECT["classifiers"] if each.startswith("Programming")]
    assert "Programming Language :: Python :: 3.11" in claimed


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_name_targets_and_files_that_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"run: make (\S+)", text):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for name in re.findall(r"\b(?:tests|scripts|mbpa)/[\w./-]+", text):
        assert (ROOT / name).exists(), name
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
