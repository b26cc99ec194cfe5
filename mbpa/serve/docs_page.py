"""The OpenAPI description as a readable page that loads no scripts, fonts or pictures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from jinja2 import Environment, StrictUndefined

# Browsers load nothing from other hosts, even if a reference to one got into the page.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'"
}
DOCS_CSS = """
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
ICON_SVG = (  # a query among its neighbours; browsers request an icon for every page
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<rect width="16" height="16" rx="4" fill="#4f46e5"/>'
    '<circle cx="8" cy="8" r="2.4" fill="#fff"/>'
    '<g fill="#c7d2fe"><circle cx="4" cy="5" r="1.3"/><circle cx="11.5" cy="4.5" r="1.3"/>'
    '<circle cx="12" cy="11" r="1.3"/><circle cx="5" cy="12" r="1.3"/></g></svg>'
)
ONE_PIXEL_PNG = (  # one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="
)
_TYPE_NAMES = {"integer": "whole number", "string": "text", "boolean": "true or false"}
_PAGE = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
).from_string("""\
{% macro show_paragraphs(paragraphs) %}
{% for paragraph in paragraphs %}
<p>{{ paragraph }}</p>
{% endfor %}
{% endmacro %}
{% macro show_fields(fields) %}
<table>
{% for name, type, meaning in fields %}
<tr><td><code>{{ name }}</code></td><td>{{ type }}</td><td>{{ meaning }}</td></tr>
{% endfor %}
</table>
{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{{ title }}</title><style>{{ css | safe }}</style></head>
<body>
<h1>{{ title }}</h1>
{{ show_paragraphs(paragraphs) }}
<p>If the service requires a token, add <code>-H 'Authorization: Bearer TOKEN'</code>.
For programs: <a href="openapi.json">openapi.json</a>.</p>
{% for operation in operations %}
<h2 id="{{ operation.path[1:] }}"><span>{{ operation.method }}</span> {{ operation.path }}</h2>
{{ show_paragraphs(operation.paragraphs) }}
{% if operation.body %}
{% for command in operation.body.commands %}
<pre>{{ command }}</pre>
{% endfor %}
<h3>takes</h3>
{{ show_paragraphs(operation.body.paragraphs) }}
{{ show_fields(operation.body.fields) }}
{% endif %}
{% if operation.result %}
<h3>returns</h3>
{{ show_fields(operation.result) }}
{% endif %}
{% if operation.errors %}
<h3>errors</h3>
<table>
{% for status, description in operation.errors %}
<tr><td>{{ status }}</td><td>{{ description }}</td></tr>
{% endfor %}
</table>
{% endif %}
{% endfor %}
</body>
</html>
""")


def describe_inputs(openapi: dict[str, Any], takes: str | None) -> None:
    """Reduce the description to what this run takes, texts or pictures; edits it in place."""
    unused = {"texts", "text"} if takes == "images" else {"images", "image"}
    schemas = openapi["components"]["schemas"]
    for name in ("Query", "ExplainQuery", "NewExample"):
        schema = schemas[name]
        schema["properties"] = {
            field: described
            for field, described in schema["properties"].items()
            if field not in unused
        }
        choice = "anyOf" if name == "NewExample" else "oneOf"
        schema[choice] = [each for each in schema[choice] if not unused & set(each["required"])]
    if takes == "images":
        query = {"images": [ONE_PIXEL_PNG]}
        schemas["Query"]["examples"] = schemas["ExplainQuery"]["examples"] = [query]
        lesson = {"label": "dot", "image": ONE_PIXEL_PNG}
        schemas["LearnRequest"]["examples"] = [{"examples": [lesson]}]
        schemas["ForgetRequest"]["examples"] = [{"label": "dot"}]


def render_page(openapi: dict[str, Any], url: str) -> str:
    """Return the description as HTML, with example commands for a service at `url`."""
    info, schemas = openapi["info"], openapi.get("components", {}).get("schemas", {})
    return _PAGE.render(
        title=f"{info['title']} {info['version']}",
        css=DOCS_CSS,
        paragraphs=_split_paragraphs(info.get("description", "")),
        operations=[
            _describe_operation(method, url.rstrip("/"), path, operation, schemas)
            for path, methods in openapi["paths"].items()
            for method, operation in methods.items()
        ],
    )


def _describe_operation(
    method: str, url: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]
) -> dict[str, Any]:
    """Return what the page shows of an operation."""
    body = None
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]["application/json"]
        schema = _resolve(content["schema"], schemas)
        body = {
            "commands": [_make_command(url + path, each) for each in schema.get("examples", ())],
            "paragraphs": _split_paragraphs(schema.get("description", "")),
            "fields": list(_list_fields(schema, schemas, ())),
        }
    elif queried := [each for each in operation.get("parameters", ()) if each["in"] == "query"]:
        schema = {"properties": {each["name"]: each["schema"] for each in queried}}
        fields = list(_list_fields(schema, schemas, ()))
        commands = [f"curl -s {shlex.quote(url + path)}"]
        body = {"commands": commands, "paragraphs": [], "fields": fields}
    responses = operation["responses"]
    content = responses.get("200", {}).get("content", {}).get("application/json", {})
    result = _resolve(content.get("schema", {}), schemas)
    return {
        "method": method.upper(),
        "path": path,
        "paragraphs": _split_paragraphs(operation.get("description", "")),
        "body": body,
        "result": list(_list_fields(result, schemas, ())),
        "errors": [
            (status, response["description"])
            for status, response in responses.items()
            if status != "200"
        ],
    }


def _make_command(url: str, example: Any) -> str:
    body = shlex.quote(json.dumps(example, ensure_ascii=False))
    return f"curl -s {shlex.quote(url)} -H 'Content-Type: application/json' \\\n  -d {body}"


def _list_fields(
    schema: dict[str, Any], schemas: dict[str, Any], within: tuple[str, ...]
) -> Iterator[tuple[str, str, str]]:
    """Yield the name, type and meaning of each field; nested fields follow their object."""
    for name, field in schema.get("properties", {}).items():
        where = (*within, name)
        meaning = [field.get("description", "")]
        kind = _name_type(field, schemas)
        if "default" in field and field["default"] is not None:
            meaning.append(f"By default {json.dumps(field['default'])}.")
        elif name not in schema.get("required", ()):  # sending null is the same as omitting it
            kind = kind.removesuffix(" or null")
            if name not in _find_alternatives(schema):
                meaning.insert(0, "Optional.")
        yield ".".join(where), kind, " ".join(filter(None, meaning))
        inner = _resolve(_find_element_schema(field), schemas)
        if inner.get("properties"):
            yield from _list_fields(inner, schemas, where)


def _find_alternatives(schema: dict[str, Any]) -> set[str]:
    """Return the fields of which one is required."""
    choices = [*schema.get("oneOf", ()), *schema.get("anyOf", ())]
    return {name for each in choices for name in each.get("required", ())}


def _name_type(field: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_name_type(each, schemas) for each in field["anyOf"])
    found = _resolve(field, schemas)
    if "enum" in found:
        return " or ".join(json.dumps(each) for each in found["enum"])
    kind = str(found.get("type", "anything"))
    if kind == "array":
        length = _format_range(found, "minItems", "maxItems")
        return f"list{length} of: {_name_type(found['items'], schemas)}"
    limits = _format_range(found, "minLength", "maxLength", " characters")
    return _TYPE_NAMES.get(kind, kind) + (limits or _format_range(found, "minimum", "maximum"))


def _format_range(schema: dict[str, Any], least: str, most: str, unit: str = "") -> str:
    if most not in schema:
        return ""
    return f" ({schema.get(least, 0):,.0f} to {schema[most]:,.0f}{unit})"


def _find_element_schema(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the elements of a list, however deeply nested."""
    while "items" in field:
        field = field["items"]
    return field


def _resolve(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = schemas[name] if name else schema
    return found


def _split_paragraphs(text: str) -> list[str]:
    parts = (" ".join(part.split()) for part in text.split("\n\n"))
    return [part for part in parts if part]
