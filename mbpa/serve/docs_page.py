"""The OpenAPI description as a readable page that loads no scripts, fonts or pictures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from html import escape
from typing import Any

# Browsers load nothing from other hosts, even if a reference to one got into the page.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'"
}
STYLE = """
:root {color-scheme: light dark}
body {font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem}
h2 {margin: 2.2rem 0 .3rem; font-size: 1.2rem}
h2 span {color: #4f7cff}
h3 {margin: 1rem 0 .2rem; font-size: 1rem; font-weight: 600}
pre {background: #8882; padding: .7rem 1rem; border-radius: .5rem; overflow-x: auto}
table {border-collapse: collapse; width: 100%}
td, th {text-align: left; vertical-align: baseline; padding: .25rem 1rem .25rem 0;
  border-top: 1px solid #8884}
th {font-weight: 400; opacity: .7}
td:first-child {width: 11rem}
"""
ICON = (  # a query among its neighbours; browsers request an icon for every page
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<rect width="16" height="16" rx="4" fill="#4f46e5"/>'
    '<circle cx="8" cy="8" r="2.4" fill="#fff"/>'
    '<g fill="#c7d2fe"><circle cx="4" cy="5" r="1.3"/><circle cx="11.5" cy="4.5" r="1.3"/>'
    '<circle cx="12" cy="11" r="1.3"/><circle cx="5" cy="12" r="1.3"/></g></svg>'
)
PICTURE = (  # one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="
)
_KINDS = {"integer": "whole number", "string": "text", "boolean": "true or false"}


def fit(openapi: dict[str, Any], takes: str | None) -> None:
    """Reduce the description to what this run takes, texts or pictures; edits it in place."""
    unused = {"texts", "text"} if takes == "images" else {"images", "image"}
    schemas = openapi["components"]["schemas"]
    for name in ("Query", "Why", "Taught"):
        schema = schemas[name]
        schema["properties"] = {
            field: told for field, told in schema["properties"].items() if field not in unused
        }
        choice = "anyOf" if name == "Taught" else "oneOf"
        schema[choice] = [each for each in schema[choice] if not unused & set(each["required"])]
    if takes == "images":
        schemas["Query"]["examples"] = schemas["Why"]["examples"] = [{"images": [PICTURE]}]
        schemas["Lessons"]["examples"] = [{"examples": [{"label": "dot", "image": PICTURE}]}]
        schemas["Forgetting"]["examples"] = [{"label": "dot"}]


def page(openapi: dict[str, Any], url: str) -> str:
    """Return the description as HTML, with example commands for a service at `url`."""
    info, schemas = openapi["info"], openapi.get("components", {}).get("schemas", {})
    requests = "".join(
        _request(method, url.rstrip("/"), path, operation, schemas)
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    )
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        f"{_paragraphs(info.get('description', ''))}"
        "<p>Where a token is asked for, add <code>-H 'Authorization: Bearer TOKEN'</code>. "
        'For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{requests}</body></html>"
    )


def _request(
    method: str, url: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]
) -> str:
    parts = [
        f'<h2 id="{escape(path[1:])}"><span>{method.upper()}</span> {escape(path)}</h2>',
        _paragraphs(operation.get("description", "")),
    ]
    if body := operation.get("requestBody"):
        schema = _resolved(body["content"]["application/json"]["schema"], schemas)
        for example in schema.get("examples", ()):
            parts.append(f"<pre>{escape(_command(url + path, example))}</pre>")
        parts += ["<h3>takes</h3>", _paragraphs(schema.get("description", ""))]
        parts.append(_fields(schema, schemas))
    for status, answer in operation["responses"].items():
        content = answer.get("content", {}).get("application/json", {})
        schema = _resolved(content.get("schema", {}), schemas)
        if status == "200" and "properties" in schema:
            parts += ["<h3>gives</h3>", _fields(schema, schemas)]
    others = {
        status: answer["description"]
        for status, answer in operation["responses"].items()
        if status != "200"
    }
    if others:
        rows = "".join(f"<tr><td>{s}</td><td>{escape(why)}</td></tr>" for s, why in others.items())
        parts.append(f"<h3>or</h3><table>{rows}</table>")
    return "".join(parts)


def _command(url: str, example: Any) -> str:
    body = shlex.quote(json.dumps(example, ensure_ascii=False))
    return f"curl -s {shlex.quote(url)} -H 'Content-Type: application/json' \\\n  -d {body}"


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{escape(what)}</td></tr>"
        for name, kind, what in _listed(schema, schemas, ())
    )
    return f"<table>{rows}</table>"


def _listed(
    schema: dict[str, Any], schemas: dict[str, Any], within: tuple[str, ...]
) -> Iterator[tuple[str, str, str]]:
    """Yield the name, type and meaning of each field; nested fields follow their object."""
    for name, field in schema.get("properties", {}).items():
        where = (*within, name)
        told = [field.get("description", "")]
        kind = _kind(field, schemas)
        if "default" in field and field["default"] is not None:
            told.append(f"By default {json.dumps(field['default'])}.")
        elif name not in schema.get("required", ()):  # sending null is the same as omitting it
            kind = kind.removesuffix(" or null")
            if name not in _alternatives(schema):
                told.insert(0, "Optional.")
        yield ".".join(where), kind, " ".join(filter(None, told))
        inner = _resolved(_innermost(field), schemas)
        if inner.get("properties"):
            yield from _listed(inner, schemas, where)


def _alternatives(schema: dict[str, Any]) -> set[str]:
    """Return the fields of which one is required."""
    choices = [*schema.get("oneOf", ()), *schema.get("anyOf", ())]
    return {name for each in choices for name in each.get("required", ())}


def _kind(field: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(each, schemas) for each in field["anyOf"])
    found = _resolved(field, schemas)
    kind = str(found.get("type", "anything"))
    if kind == "array":
        return f"list{_between(found, 'minItems', 'maxItems')} of: {_kind(found['items'], schemas)}"
    limits = _between(found, "minLength", "maxLength", " characters")
    return _KINDS.get(kind, kind) + (limits or _between(found, "minimum", "maximum"))


def _between(schema: dict[str, Any], least: str, most: str, unit: str = "") -> str:
    if most not in schema:
        return ""
    return f" ({schema.get(least, 0):,.0f} to {schema[most]:,.0f}{unit})"


def _innermost(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the elements of a list, however deeply nested."""
    while "items" in field:
        field = field["items"]
    return field


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = schemas[name] if name else schema
    return found


def _paragraphs(text: str) -> str:
    parts = (" ".join(part.split()) for part in text.split("\n\n"))
    return "".join(f"<p>{escape(part)}</p>" for part in parts if part)
