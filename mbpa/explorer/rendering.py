"""HTML for the page: the title, an answer with its bars, memories, and opinions on an example.

It needs no scripts, files or requests. Texts come from users: Jinja2 escapes every value.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

from mbpa.explorer.review import Opinion
from mbpa.serve.answers import Reason
from mbpa.serve.audit import format_time
from mbpa.serve.journal import ListedExample

COLOURS = ("#4f7cff", "#f08c2e", "#2fa36b", "#b065c9", "#e0566b")  # readable on light and dark
OTHER_COLOUR = "#98a1b3"
MAX_BARS, MAX_MEMORIES = 5, 6  # shown per answer
MAX_SHORT_CHARACTERS, MAX_LONG_CHARACTERS = 110, 600  # of a text in a table, or by itself
NO_THUMBS: Mapping[int, str] = MappingProxyType({})  # in a run that takes texts

CSS = """
.mbpa {font-size: 15px; line-height: 1.45}
.mbpa h1 {font-size: 28px; font-weight: 700; letter-spacing: -.02em; margin: 0}
.mbpa .verdict {display: flex; align-items: baseline; gap: 10px; flex-wrap: wrap;
  margin: 2px 0 14px}
.mbpa .verdict b {font-size: 22px; font-weight: 650; overflow-wrap: anywhere}
.mbpa :is(.quiet, th), .mbpa.quiet {color: var(--body-text-color-subdued); font-weight: 400;
  font-size: 13px}
.mbpa .tag {border-radius: 99px; padding: 1px 10px; font-size: 13px; color: #fff}
.mbpa .bars {display: grid; grid-template-columns: minmax(90px, 34%) 1fr 48px; gap: 8px 12px;
  align-items: center}
.mbpa .name {overflow: hidden; text-overflow: ellipsis; white-space: nowrap; text-align: right}
.mbpa .bar {height: 8px; border-radius: 4px; min-width: 2px; margin: 2px 0}
.mbpa .bar.before {background: #98a1b3; opacity: .55; height: 5px}
.mbpa .number {font-variant-numeric: tabular-nums; text-align: right}
.mbpa table {width: 100%; border-collapse: collapse}
.mbpa td, .mbpa th {padding: 6px 0 6px 16px; text-align: left; vertical-align: baseline}
.mbpa td {border-top: 1px solid var(--border-color-primary)}
.mbpa :is(td, th):first-child {padding-left: 0}
.mbpa th.number {text-align: right}
.mbpa .chips {display: flex; flex-wrap: wrap; gap: 2px 14px}
.mbpa .chip {display: inline-flex; align-items: baseline; overflow-wrap: break-word}
.mbpa td .chip {min-width: 150px}
.mbpa .dot {flex: none; width: 9px; height: 9px; border-radius: 9px; margin-right: 7px}
.mbpa img {display: block; border-radius: 4px; object-fit: contain; background: #8882}
.mbpa.asked {display: flex; gap: 18px}
.mbpa.asked > div {flex: 1; min-width: 0}
.mbpa.asked > img {flex: none; width: 120px; height: 120px}
.mbpa td img {width: 44px; height: 44px}
.mbpa td:has(img) ~ td, .mbpa td:has(img) {vertical-align: middle}
.mbpa img.large {width: 160px; height: 160px}
.mbpa svg {width: 100%; height: auto; display: block}
.mbpa svg text {fill: var(--body-text-color); font-size: 12px}
"""

_PARTS = """
{% macro show_chip(label, colour) -%}
<span class="chip"><span class="dot" style="background: {{ colour }}"></span>
<span>{{ label | breakable }}</span></span>
{%- endmacro %}
{% macro show_example(example, kind="small") -%}
{% if example.thumb %}<img class="{{ kind }}" src="{{ example.thumb }}" alt="{{ example.name }}"/>
{%- else %}{{ example.text }}{% endif %}
{%- endmacro %}
"""
_TITLE = """
<div class="mbpa"><h1>mbpa explorer</h1><div class="quiet">
{{ "{:,}".format(stats.examples) }} examples · {{ stats.labels }} labels ·
{{ "{:,}".format(stats.taught) }} taught since training
{% if stats.read_only %}· <b>read-only: {{ stats.read_only }}</b>{% endif %}
</div></div>
"""
_NOTE = """<div class="mbpa quiet">{{ text }}</div>"""
_EXAMPLE = """{% from "parts" import show_example %}{{ show_example(example) }}"""
_ANSWER = """
<div class="mbpa{{ ' asked' if picture else '' }}">
{% if picture %}<img src="{{ picture }}" alt="your picture"/>{% endif %}
<div>
<div class="verdict"><span class="tag" style="background: {{ tag_colour }}">{{ tag }}</span>
<b>{{ label | breakable }}</b><span class="quiet">{{ why }}</span></div>
<div class="bars">
{% for bar in bars %}
<div class="name" title="{{ bar.label }}">{{ bar.label }}</div>
<div><div class="bar before" style="width: {{ '%.1f' % (100 * bar.before) }}%"></div>
<div class="bar" style="width: {{ '%.1f' % (100 * bar.after) }}%; background: {{ bar.colour }}">
</div></div>
<div class="number">{{ bar.after | percent }}<div class="quiet">{{ bar.before | percent }}</div>
</div>
{% endfor %}
</div>
<div class="quiet" style="margin-top: 12px">
thin and grey: the head alone · coloured: adapted to the memories below ·
the head moved by ‖θˣ − θ‖ = {{ "%.3g" % change }}</div>
</div></div>
"""
_MEMORIES = """
{% from "parts" import show_chip, show_example %}
<div class="mbpa"><table>
<tr><th>retrieved memory</th><th>label</th>
<th class="number">weight</th><th class="number">distance</th></tr>
{% for memory in memories %}
<tr><td>{{ show_example(memory) }}</td><td>{{ show_chip(memory.label, memory.colour) }}</td>
<td class="number">{{ memory.weight | percent }}</td>
<td class="number">{{ "%.2f" % memory.distance }}</td></tr>
{% endfor %}
</table>
{% if more > 0 %}<div class="quiet" style="padding-top: 6px">and {{ more }} more</div>{% endif %}
</div>
"""
_OPINION = """
{% from "parts" import show_example %}
<div class="mbpa"><div style="font-size: 17px; margin-bottom: 8px">
{{ show_example(example, "large") }}</div>
<div class="quiet">labelled</div><b>{{ label | breakable }}</b>
<div style="margin-top: 8px">
{% if opinion.label == label %}
Its neighbours agree, with {{ opinion.share | percent }} of the vote.
{% else %}
Its neighbours vote for <b>{{ opinion.label | breakable }}</b>, with
{{ opinion.share | percent }} of the vote; its own label gets {{ opinion.own | percent }}.
{% endif %}
</div></div>
"""


_TAUGHT = """
{% from "parts" import show_example %}
<div class="mbpa"><div style="font-size: 17px; margin-bottom: 8px">
{{ show_example(example, "large") }}</div>
<div class="quiet">taught as</div><b>{{ label | breakable }}</b>
{% if when %}<div class="quiet" style="margin-top: 8px">
{{ when }} UTC{% if by %}, by {{ by }}{% endif %}</div>{% endif %}
</div>
"""


def allow_breaks(label: str) -> Markup:
    """Return a label, escaped, with line breaks allowed after underscores."""
    return escape(label).replace("_", Markup("_<wbr/>"))


def format_percent(share: float) -> str:
    """Format a share as a percentage, as short as possible; 0% and 100% are always exact."""
    if share < 0.0005:
        return "0%" if share <= 0 else "<0.1%"
    if share > 0.995:
        return "100%" if share >= 1 else ">99%"
    return f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:.1f}%"


def make_environment(templates: Mapping[str, str]) -> Environment:
    """Return an environment of these templates, in which every value is escaped."""
    environment = Environment(
        loader=DictLoader({"parts": _PARTS, **templates}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": allow_breaks, "percent": format_percent}
    return environment


_TEMPLATES = make_environment(
    {
        "title": _TITLE,
        "note": _NOTE,
        "example": _EXAMPLE,
        "answer": _ANSWER,
        "memories": _MEMORIES,
        "opinion": _OPINION,
        "taught": _TAUGHT,
    }
)


def render_title(stats: Mapping[str, object]) -> str:
    """Return the title of the page and a line with counts."""
    return _TEMPLATES.get_template("title").render(stats=stats)


def render_note(text: str) -> str:
    """Return a short note in place of content."""
    return _TEMPLATES.get_template("note").render(text=text)


def assign_colours(reason: Reason) -> dict[str, str]:
    """Return a colour for each label shown, used for bars, memories and map alike."""
    return dict(zip((label for label, *_ in list_bars(reason)), COLOURS, strict=False))


def list_bars(reason: Reason) -> list[tuple[str, float, float]]:
    """Return labels with their probabilities before and after adaptation, sorted by the latter."""
    before, after = dict(reason.before), dict(reason.answer.top)
    shares = {label: (before.get(label, 0.0), after.get(label, 0.0)) for label in before | after}
    shown = sorted(shares, key=lambda label: (-max(shares[label]), label))[:MAX_BARS]
    return [(label, *shares[label]) for label in sorted(shown, key=lambda name: -shares[name][1])]


def render_answer(reason: Reason, threshold: float, picture: str | None = None) -> str:
    """Return the verdict and bars before and after adaptation, beside the picture, if any."""
    bars = list_bars(reason)
    if not bars:
        return render_note("There are no labels yet: teach one.")
    colours = assign_colours(reason)
    label, share = reason.answer.top[0]
    if reason.answer.abstains:
        tag, tag_colour = "abstains", OTHER_COLOUR
        why = f"{format_percent(share)} sure, but it answers only from {format_percent(threshold)}"
    else:
        tag, tag_colour = "answers", colours.get(label, OTHER_COLOUR)
        why = f"{format_percent(share)} sure"
    if reason.before and reason.before[0][0] != label:
        why += f" · without its memory: {reason.before[0][0]}"
    return _TEMPLATES.get_template("answer").render(
        tag=tag,
        tag_colour=tag_colour,
        label=label,
        why=why,
        bars=[
            {"label": label, "before": before, "after": after, "colour": colours[label]}
            for label, before, after in bars
        ],
        change=reason.change,
        picture=picture,
    )


def render_memories(reason: Reason, thumbs: Mapping[int, str] = NO_THUMBS) -> str:
    """Return a table of the retrieved examples, sorted by falling weight."""
    if not reason.neighbors:
        return render_note("No memory took part.")
    colours = assign_colours(reason)
    near = sorted(reason.neighbors, key=lambda each: -each.weight)
    return _TEMPLATES.get_template("memories").render(
        memories=[
            {
                **describe_example(each.id, each.text, thumbs, MAX_SHORT_CHARACTERS),
                "label": each.label,
                "colour": colours.get(each.label, OTHER_COLOUR),
                "weight": each.weight,
                "distance": each.distance,
            }
            for each in near[:MAX_MEMORIES]
        ],
        more=len(near) - MAX_MEMORIES,
    )


def render_example(id: int, text: str | None, thumbs: Mapping[int, str] = NO_THUMBS) -> str:
    """Return an example for a list: its picture, or its text."""
    example = describe_example(id, text, thumbs, MAX_LONG_CHARACTERS)
    return _TEMPLATES.get_template("example").render(example=example)


def render_opinion(opinion: Opinion, thumbs: Mapping[int, str] = NO_THUMBS) -> str:
    """Return an example with the vote of its neighbours."""
    example = opinion.example
    return _TEMPLATES.get_template("opinion").render(
        opinion=opinion,
        label=example.label,
        example=describe_example(example.id, example.text, thumbs, MAX_LONG_CHARACTERS),
    )


def render_taught(listed: ListedExample, thumbs: Mapping[int, str] = NO_THUMBS) -> str:
    """Return a taught example with its label, time and teacher."""
    return _TEMPLATES.get_template("taught").render(
        example=describe_example(listed.id, listed.text, thumbs, MAX_LONG_CHARACTERS),
        label=listed.label,
        when=format_minute(listed.taught_ms),
        by=listed.by,
    )


def format_minute(time_ms: int | None) -> str:
    """Return a time in UTC, to the minute."""
    return "" if time_ms is None else format_time(time_ms)[:16].replace("T", " ")


def describe_example(
    id: int, text: str | None, thumbs: Mapping[int, str], max_characters: int
) -> dict[str, str | None]:
    """Return the name of an example, its text, cut if it is too long, and its thumbnail, if any."""
    name = f"example {id}"
    if text is not None and len(text) > max_characters:
        text = text[:max_characters].rstrip() + "…"
    return {"name": name, "text": name if text is None else text, "thumb": thumbs.get(id)}
