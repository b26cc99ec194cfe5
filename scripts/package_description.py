"""Build hook: the description of the package is the README, made readable outside the repository.

In the README, images and links are relative to the repository. A package index shows the
description on a page of its own, where these lead nowhere. If `[project.urls]` in pyproject.toml
has a `Repository`, they are made absolute, at the tag of the version. Otherwise the images are left
out, with their captions, and links become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")
IMAGE_WITH_CAPTION = re.compile(r"^!\[[^\]]*\]\([^)]+\)\n\n(?:\*[^*]+\*\n\n)?", re.MULTILINE)


class PackageDescription(MetadataHookInterface):
    """Sets the field `readme` of the metadata, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text("utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        text = describe_package(readme, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def describe_package(readme: str, repository: str | None, tag: str) -> str:
    """Return a README without links that are relative to its repository.

    Args:
        readme: text in Markdown.
        repository: address of the repository, as GitHub and GitLab have it; `None`: not known.
        tag: name of the version in the repository.
    """
    if repository is None:
        return LINK.sub(r"\1", IMAGE_WITH_CAPTION.sub("", readme))
    place = repository.rstrip("/")
    linked = LINK.sub(rf"[\1]({place}/blob/{tag}/\2)", readme)
    return IMAGE.sub(rf"![\1]({place}/raw/{tag}/\2)", linked)
