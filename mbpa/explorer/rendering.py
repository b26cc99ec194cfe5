"""HTML for the page: the title, an answer with its bars, memories, and opinions on an example.

It needs no scripts, files or requests. Texts come from users: Jinja2 escapes every value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

from mbpa.explorer.review import Opinion
from mbpa.serve.answers import Reason
from mbpa.serve.audit import format_time
from mbpa.serve.journal import ListedExample
from mbpa.serve.shared_journal import ReplicaStatus

FIRST_COLOUR, SECOND_COLOUR = "var(--colour-first)", "var(--colour-second)"
OTHER_COLOUR = "var(--colour-other)"
"""Colours stand for roles, not for labels, so that they mean the same in every answer."""
MAX_BARS, MAX_MEMORIES = 5, 6  # shown per answer
MAX_SHORT_CHARACTERS, MAX_LONG_CHARACTERS = 110, 600  # of a text in a table, or by itself
NO_THUMBS: Mapping[int, str] = MappingProxyType({})  # in a run that takes texts
_WORD_ENDS = re.compile(r"(?<=[_./:\\-])(?=\S)|(?<=[a-z])(?=[A-Z])")

_PARTS = """
{% macro show_chip(label, colour, kind="") -%}
<span class="chip"><span class="dot{{ kind }}" style="background: {{ colour }}"></span>
<span>{{ label | breakable }}</span></span>
{%- endmacro %}
{% macro show_example(example, kind="small") -%}
{% if example.thumb %}<img class="{{ kind }}" src="{{ example.thumb }}" alt="{{ example.name }}"/>
{%- else %}{{ example.text }}{% endif %}
{%- endmacro %}
"""
_TITLE = """
<div class="mbpa"><h1>mbpa explorer</h1><div class="quiet">
{{ "{:,}".format(stats.examples) }} examples, {{ stats.labels }} labels,
{{ "{:,}".format(stats.taught) }} taught since training
{% if replica %}; replica at position {{ "{:,}".format(replica.position) }},
{{ replica.lag }} behind, last loaded as a whole at {{ "{:,}".format(replica.snapshot) }}
{%- if replica.stale_s > 3 %}, up to date {{ "%.0f" | format(replica.stale_s) }} s ago{% endif %}
{% endif %}
{% if stats.read_only %}. <b>Read-only: {{ stats.read_only }}</b>{% endif %}
</div></div>
"""
_NOTE = """<div class="mbpa quiet">{{ text }}</div>"""
_STEPS = """
<div class="mbpa"><h2>{{ title }}</h2><ol class="steps">
{% for step in steps %}<li>{{ step }}</li>{% endfor %}
</ol></div>
"""
_MESSAGE = """<div class="mbpa">{{ text | breakable }}</div>"""
_ANSWER = """
{% from "parts" import show_chip %}
<div class="mbpa{{ ' asked' if picture else '' }}">
{% if picture %}<img src="{{ picture }}" alt="your picture"/>{% endif %}
<div>
<div class="verdict">{% if abstains %}<span class="tag unsure">Not sure</span>
{%- else %}<span class="tag">Answer</span>{% endif %}
<b>{{ label | breakable }}</b></div>
{% if abstains %}
<p>This is the most likely label, but the classifier is only {{ share | percent }} sure. It answers
when it is at least {{ threshold | percent }} sure.</p>
{% else %}
<p>{{ share | percent }} sure.</p>
{% endif %}
{% if scope is not none %}
<p>{{ scope | percent }} likely to belong to one of the labels at all.</p>
{% endif %}
{% if alone %}
<p>{{ reference | capitalize }}: {% if alone[0] == label %}the same label,
{% else %}<b>{{ alone[0] | breakable }}</b>, {% endif %}{{ alone[1] | percent }} sure.</p>
{% endif %}
<ol class="bars">
{% for bar in bars %}
<li><span>{{ bar.label | breakable }}</span><span class="number">{{ bar.after | percent }}</span>
<div class="bar" style="width: {{ '%.1f' % (100 * bar.after) }}%; background: {{ bar.colour }}">
</div>
<div class="bar before" style="width: {{ '%.1f' % (100 * bar.before) }}%"
 title="{{ bar.before | percent }} {{ reference }}"></div></li>
{% endfor %}
</ol>
<div class="quiet chips">
{% for role, colour in roles.items() %}{{ show_chip(role, colour) }}{% endfor %}
{{ show_chip(reference, "none", " thin") }}</div>
{% if change %}
<div class="quiet" title="‖θˣ − θ‖: how far the parameters moved for this query">
The classifier was adjusted to the examples below, by {{ "%.3g" % change }}.</div>
{% endif %}
</div></div>
"""
_MEMORIES = """
{% from "parts" import show_chip, show_example %}
<div class="mbpa"><h2>{{ title }}</h2>
<ol class="sources">
{% for memory in memories %}
<li><span class="what">{{ show_example(memory) }}</span>
{{ show_chip(memory.label, memory.colour) }}
<span class="quiet number" title="distance {{ '%.2f' % memory.distance }}">
{{ memory.similarity | percent }} similar
{%- if memory.weight is not none %}, influence {{ memory.weight | percent }}{% endif %}</span></li>
{% endfor %}
</ol>
{% if more > 0 %}<div class="quiet">and {{ more }} more</div>{% endif %}
</div>
"""
_ROWS = """
{% from "parts" import show_example %}
{% if rows %}
<fieldset class="mbpa rows"><legend>{{ title }}</legend>
{% for row in rows %}
<label class="choice"><input type="radio" name="{{ title }}" value="{{ row.key }}"
{% if row.key == chosen %} checked="checked"{% endif %}/>
<div><div>{{ show_example(row.example) if row.example else row.key | breakable }}</div>
{% for fact in row.facts %}<div class="quiet">{{ fact | breakable }}</div>{% endfor %}</div></label>
{% endfor %}
</fieldset>
{% else %}
<div class="mbpa quiet">{{ nothing }}</div>
{% endif %}
"""
_OPINION = """
{% from "parts" import show_example %}
<div class="mbpa"><div style="font-size: 17px; margin-bottom: 8px">
{{ show_example(example, "large") }}</div>
<div class="quiet">labelled</div><b>{{ label | breakable }}</b>
<div style="margin-top: 8px">
{% if opinion.label == label %}
Its neighbours, the examples most similar to it, agree, with {{ opinion.share | percent }} of the
vote.
{% else %}
Its neighbours, the examples most similar to it, suggest
<b>{{ opinion.label | breakable }}</b>, with {{ opinion.share | percent }} of the vote. Its own
label gets {{ opinion.own | percent }}.
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
_LABEL = """
<div class="mbpa"><h2>{{ label | breakable }}</h2>
<p>{{ count }}, {{ "known since training" if is_trained else "taught since training" }}.</p></div>
"""


def allow_breaks(text: str) -> Markup:
    """Return a text, escaped, in which lines may break where a word of a label ends."""
    return Markup("<wbr/>").join(escape(part) for part in _WORD_ENDS.split(text))


def format_percent(share: float) -> str:
    """Format a share as a percentage, as short as possible; 0% and 100% are always exact."""
    if share < 0.0005:
        return "0%" if share <= 0 else "under 0.1%"
    if share > 0.995:
        return "100%" if share >= 1 else "over 99%"
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
        "steps": _STEPS,
        "message": _MESSAGE,
        "rows": _ROWS,
        "label": _LABEL,
        "answer": _ANSWER,
        "memories": _MEMORIES,
        "opinion": _OPINION,
        "taught": _TAUGHT,
    }
)


def render_title(stats: Mapping[str, object], replica: ReplicaStatus | None = None) -> str:
    """Return the title of the page and a line with counts, and with the state of a replica."""
    return _TEMPLATES.get_template("title").render(stats=stats, replica=replica)


def render_note(text: str) -> str:
    """Return a short note in place of content."""
    return _TEMPLATES.get_template("note").render(text=text)


def render_message(text: str) -> str:
    """Return what was done, in one sentence."""
    return _TEMPLATES.get_template("message").render(text=text) if text else ""


def render_steps(title: str, steps: Sequence[str]) -> str:
    """Return instructions in place of content."""
    return _TEMPLATES.get_template("steps").render(title=title, steps=steps)


def assign_colours(reason: Reason) -> dict[str, str]:
    """Return a colour for each label shown, used for bars, memories and map alike."""
    labels = [label for label, *_ in list_bars(reason)]
    return dict(zip(labels, (FIRST_COLOUR, SECOND_COLOUR), strict=False)) | dict.fromkeys(
        labels[2:], OTHER_COLOUR
    )


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
    roles = {"most likely": FIRST_COLOUR, "second": SECOND_COLOUR, "others": OTHER_COLOUR}
    return _TEMPLATES.get_template("answer").render(
        abstains=reason.answer.abstains,
        label=label,
        share=share,
        threshold=threshold,
        scope=reason.answer.in_scope,
        reference="without the examples below" if adapts(reason) else "from training alone",
        alone=reason.before[0] if reason.before else None,
        bars=[
            {"label": label, "before": before, "after": after, "colour": colours[label]}
            for label, before, after in bars
        ],
        roles=dict(list(roles.items())[: len(bars)]),
        change=reason.change,
        picture=picture,
    )


def render_memories(reason: Reason, thumbs: Mapping[int, str] = NO_THUMBS) -> str:
    """Return a list of the retrieved examples, sorted by falling weight."""
    if not reason.neighbors:
        return render_note("The answer is not based on any example.")
    colours = assign_colours(reason)
    near = sorted(reason.neighbors, key=lambda each: -each.weight)
    return _TEMPLATES.get_template("memories").render(
        memories=[
            {
                **describe_example(each.id, each.text, thumbs, MAX_SHORT_CHARACTERS),
                "label": each.label,
                "colour": colours.get(each.label, OTHER_COLOUR),
                "weight": each.weight if adapts(reason) else None,
                "distance": each.distance,
                "similarity": compute_similarity(each.distance),
            }
            for each in near[:MAX_MEMORIES]
        ],
        more=len(near) - MAX_MEMORIES,
        title="Examples that the answer is based on" if adapts(reason) else "Nearest examples",
    )


def adapts(reason: Reason) -> bool:
    """Return whether the answer was adapted to the examples, rather than learnt in closed form."""
    return reason.answer.in_scope is None


def compute_similarity(distance: float) -> float:
    """Return the cosine of the angle between keys of unit length, 0 if they point apart."""
    return max(0.0, 1.0 - distance**2 / 2)


@dataclass(frozen=True)
class Row:
    """A row of a list from which a visitor chooses one."""

    key: str
    """Identifies the row; shown if it has no example."""
    facts: tuple[str, ...] = ()
    """What is written below, one line each."""
    example: Mapping[str, str | None] | None = None
    """Result of `describe_example`."""


def render_rows(title: str, rows: Sequence[Row], chosen: str | None, nothing: str) -> str:
    """Return a list of radio buttons.

    Args:
        title: name of the list for screen readers, different for each list of the page.
        rows: its rows.
        chosen: key of the row that is chosen.
        nothing: note to show if there are no rows.
    """
    return _TEMPLATES.get_template("rows").render(
        title=title, rows=rows, chosen=chosen, nothing=nothing
    )


def render_label(label: str, count: int, is_trained: bool) -> str:
    """Return a label with the number of its examples."""
    return _TEMPLATES.get_template("label").render(
        label=label, count=count_examples(count), is_trained=is_trained
    )


def count_examples(count: int) -> str:
    """Return a number of examples in words."""
    return "1 example" if count == 1 else f"{count:,} examples"


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
