"""What a run's identity depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import EXPERIMENTS
from experiments.identity import digest_code, find_dependencies


@pytest.mark.heavy
def test_an_experiment_depends_on_what_it_imports_and_on_nothing_else() -> None:
    for place in EXPERIMENTS.values():
        module = place.partition(":")[0]
        found = find_dependencies(module)
        assert {module, "mbpa.memory.exact", "experiments.experiment"} <= found.keys()
        assert not any(
            name.startswith(("mbpa.serve", "mbpa.explorer", "mbpa.cli")) for name in found
        )
    language = find_dependencies("experiments.language")
    assert "experiments.language.network" in language
    assert "experiments.images.task" not in language


def test_the_digest_changes_with_a_module_that_is_imported_indirectly(
    tmp_path: Path, monkeypatch
) -> None:
    package = tmp_path / "trial"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("def use():\n    from trial import two\n")
    (package / "two.py").write_text("from trial.three import VALUE\n")
    for name in ("three", "unused"):
        (package / f"{name}.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert len(find_dependencies("trial.one")) == 4
    before = digest_code("trial.one")
    (package / "unused.py").write_text("VALUE = 2\n")
    assert digest_code("trial.one") == before
    (package / "three.py").write_text("VALUE = 2\n")
    assert digest_code("trial.one") != before
