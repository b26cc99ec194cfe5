"""Events of MkDocs: adds generated pages, fills the navigation, adapts Markdown and HTML.

The documents are written for GitHub, and read there, too. What differs here is changed on the way:
`website.dialect` translates Markdown, and pictures in SVG become part of the page, so that they
follow its colours. `website.reference` writes the pages of the reference.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # `mkdocs` itself does not look for modules here
    sys.path.insert(0, str(ROOT))

from website import dialect, reference  # noqa: E402

PAGES_OF_ROOT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_config(config: Any) -> Any:
    """Complete the navigation, and set the options that are functions."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # anchors as on GitHub
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [dialect.MATH_FENCE]}
    guides = _get_section(config.nav, "Guides")
    integrations = _get_section(guides, "Integrations")
    integrations += sorted(path.name for path in (ROOT / "docs").glob("integrations*.md"))
    if not integrations:
        guides.remove({"Integrations": []})
    _get_section(config.nav, "Reference").extend(reference.make_navigation())
    _get_section(config.nav, "Results").extend(
        [{"Changes": "changelog.md"}, {"Contributing": "contributing.md"}]
    )
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    pages = reference.write_pages()
    for source, target in PAGES_OF_ROOT.items():
        pages[target] = (ROOT / source).read_text("utf-8").replace("](docs/", "](")
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Translate a page to the dialect of MkDocs.

    A link to a file that only the repository has becomes plain text.
    """
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    here = posixpath.dirname(page.file.src_uri)

    def mend(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, found[2]))
        if not path.startswith("../"):
            return found[0]
        target = PAGES_OF_ROOT.get(path.removeprefix("../"))
        return f"[{found[1]}]({posixpath.relpath(target, here)})" if target else found[1]

    markdown = re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)\)", mend, markdown)
    return dialect.translate(markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put drawings into the page, link public names, and let wide tables scroll."""
    html = dialect.inline_drawings(html, ROOT / "docs")
    html = html.replace("<table>", '<div class="scrolls" tabindex="0"><table>')
    html = html.replace("</table>", "</table></div>")
    if not page.file.src_uri.startswith("reference/"):
        return reference.link_names(html, page.file.url)
    root = "../" * page.file.url.count("/")
    return re.sub(r"\bdocs/([\w-]+)\.md\b", rf'<a href="{root}\1/">\1</a>', html)


def _get_section(nav: list[Any], name: str) -> list[Any]:
    (section,) = (each[name] for each in nav if isinstance(each, dict) and name in each)
    return section
