"""The files for containers: their commands exist, and what they refer to is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import mbpa
from mbpa.cli import main

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
OBJECTS: list[dict[str, Any]] = [
    each for path in MANIFESTS for each in yaml.safe_load_all(path.read_text("utf-8")) if each
]


def walk(tree: Any) -> Iterator[Any]:
    yield tree
    if isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from walk(part)


def list_commands() -> list[list[str]]:
    """Return the arguments of `mbpa` in all files."""
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    found = [yaml.safe_load(line) for line in re.findall(r"^CMD (\[.*\])$", dockerfile, re.M)]
    found += [each["command"] for each in COMPOSE["services"].values() if "command" in each]
    found += [each["args"] for each in walk(OBJECTS) if isinstance(each, dict) and "args" in each]
    unit = (DEPLOY / "mbpa.service").read_text("utf-8").replace("/srv/mbpa/run", "/data/run")
    found += [line.split()[1:] for line in re.findall(r"^ExecStart=(.*)$", unit, re.M)]
    return found


def test_there_is_a_command_in_each_place() -> None:
    assert [command[0] for command in list_commands()].count("serve") == 4
    assert [command[:2] for command in list_commands()].count(["journal", "copy"]) == 2


@pytest.mark.parametrize("command", list_commands(), ids=" ".join)
def test_commands_take_these_arguments(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is not there is the only thing that a command may complain about."""
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("mbpa: /data/run is not a run")


def test_secrets_claims_and_services_that_are_referred_to_exist() -> None:
    kinds = {(each["kind"], each["metadata"]["name"]) for each in OBJECTS}
    claims = {
        each["claimName"]
        for each in walk(OBJECTS)
        if isinstance(each, dict) and "claimName" in each
    }
    assert {("PersistentVolumeClaim", name) for name in claims} <= kinds
    keys = {
        each["secretKeyRef"]["key"]
        for each in walk(OBJECTS)
        if isinstance(each, dict) and "secretKeyRef" in each
    }
    guide = (ROOT / "docs" / "deploying.md").read_text("utf-8")
    assert keys == set(re.findall(r"--from-literal=([a-z-]+)=", guide))
    assert ("Service", "database") in kinds
    assert {each["metadata"].get("namespace", "mbpa") for each in OBJECTS} == {"mbpa"}
    for name in re.findall(r"deploy/kubernetes/(\S+\.yaml)", guide):
        assert (DEPLOY / "kubernetes" / name).is_file(), name


def test_images_have_the_version_of_the_package() -> None:
    images = {each["image"] for each in walk(OBJECTS) if isinstance(each, dict) and "image" in each}
    assert images == {"postgres:17", f"mbpa:{mbpa.__version__}"}


def test_the_image_contains_what_it_copies() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text("utf-8")
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8")
    for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.M):
        for name in line.split():
            assert (ROOT / name).exists(), name
            assert f"!{name}\n" in kept, name
    assert re.search(r"^USER 10001$", dockerfile, re.M)
    extras = re.findall(r"'\.\[([a-z,]+)\]'", dockerfile)[0].split(",")
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert all(re.search(rf"^{extra} = ", project, re.M) for extra in extras)


def test_compose_and_kubernetes_serve_the_same_way() -> None:
    replica = COMPOSE["services"]["replica"]
    (container,) = (
        part["spec"]["template"]["spec"]["containers"][0]
        for part in OBJECTS
        if part["kind"] == "Deployment"
    )
    assert container["args"] == replica["command"]
    assert {each["name"] for each in container["env"]} >= set(replica["environment"])
