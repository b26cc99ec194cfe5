"""Report on language modelling, built from the records alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.language.evaluation import (
    ADAM,
    ALL,
    BOTH,
    CACHE,
    COMPARED,
    DYNAMIC,
    EVERYTHING,
    GATED,
    GATED_CACHE,
    GATED_MBPA,
    LOOP,
    LSTM,
    MBPA,
    MEMORY,
    PAPER_WEIGHTS,
)
from experiments.results import Record, Result, value_of
from experiments.sections import Figure, Section, Table

if TYPE_CHECKING:
    import matplotlib.figure

COLORS = {
    LSTM: "#8c8c8c",
    CACHE: "#e08214",
    MBPA: "#b2182b",
    BOTH: "#762a83",
    MEMORY: "#c7a8d6",
    DYNAMIC: "#35978f",
    ADAM: "#80cdc1",
    ALL: "#2166ac",
}
METHODS = (
    LSTM,
    CACHE,
    MBPA,
    BOTH,
    GATED_CACHE,
    GATED_MBPA,
    GATED,
    MEMORY,
    DYNAMIC,
    ADAM,
    ALL,
    EVERYTHING,
)
"""The rows of the table of perplexities."""
TITLES = {"ptb": "Penn Treebank", "wikitext-2": "WikiText-2", "own": "own text"}
Numbers = tuple[float | None, float]
PAPER: dict[str, dict[str, Numbers]] = {
    "ptb": {
        LSTM: (61.8, 59.6),
        CACHE: (55.7, 55.3),
        MBPA: (54.8, 54.3),
        BOTH: (54.8, 54.4),
    },
    "wikitext-2": {
        LSTM: (69.3, 65.9),
        CACHE: (53.2, 51.3),
        MBPA: (58.4, 56.0),
        BOTH: (51.8, 49.4),
    },
}
"""Table 2 of the paper: perplexities of the validation and the test text."""
CITED: dict[str, dict[str, Numbers]] = {
    "ptb": {
        "CharCNN (Zhang et al., 2015)": (None, 78.9),
        "Variational LSTM (Aharoni et al., 2017)": (None, 61.7),
        "LSTM + cache (Grave et al., 2016)": (74.6, 72.1),
        "LSTM (Melis et al., 2017)": (60.9, 58.3),
        "AWD-LSTM (Merity et al., 2017)": (60.0, 57.3),
        "AWD-LSTM + cache (Merity et al., 2017)": (53.9, 52.8),
        "AWD-LSTM (Krause et al., 2017)": (59.8, 57.7),
        "AWD-LSTM + dynamic evaluation (Krause et al., 2017)": (51.6, 51.1),
    },
    "wikitext-2": {
        "LSTM + cache (Grave et al., 2016)": (72.1, 68.9),
        "LSTM (Melis et al., 2017)": (69.1, 65.9),
        "AWD-LSTM (Merity et al., 2017)": (68.6, 65.8),
        "AWD-LSTM + cache (Merity et al., 2017)": (53.8, 52.0),
        "AWD-LSTM (Krause et al., 2017)": (68.9, 66.1),
        "AWD-LSTM + dynamic evaluation (Krause et al., 2017)": (46.4, 44.3),
    },
}
"""Rows of the paper's table that are taken from other publications, with other networks."""
OVER = {
    "AWD-LSTM + cache (Merity et al., 2017)": "AWD-LSTM (Merity et al., 2017)",
    "AWD-LSTM + dynamic evaluation (Krause et al., 2017)": "AWD-LSTM (Krause et al., 2017)",
}
"""The row that each of these improves on."""


class Scores:
    """Records of several networks."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = results
        self.config: dict[str, Any] = results[0].config
        self.corpus = str(self.config["corpus"])
        self.records = [record for result in results for record in result.metrics]

    def values(self, name: str, **of: object) -> list[float]:
        """Return the values of matching records, one per seed."""
        return [value_of(record) for record in self.found(name, **of)]

    def found(self, name: str, **of: object) -> list[Record]:
        wanted = {"name": name, **of}
        return [r for r in self.records if all(r.get(key) == wanted[key] for key in wanted)]

    @property
    def is_of_a_whole_corpus(self) -> bool:
        """Whether the whole corpus was used, so that perplexities compare with published ones."""
        return self.corpus in PAPER and not (self.config["tokens"] or self.config["scored_tokens"])

    @property
    def methods(self) -> list[str]:
        return [method for method in METHODS if self.values("perplexity", method=method)]

    @property
    def networks(self) -> str:
        count = len(self.results)
        return "one network" if count == 1 else f"mean ± standard deviation of {count} networks"


def sections(results: Sequence[Result]) -> list[Section]:
    """Return table 2, the times, and which words gain."""
    scores = Scores(results)
    title = TITLES[scores.corpus]
    found = [
        Section(
            title=f"Language modelling, {title}",
            text=_text(scores),
            tables=[_perplexities(scores), *_times(scores)],
            figures=_curves(scores),
        )
    ]
    if scores.found("improvement"):
        found.append(
            Section(
                title=f"Which words gain, {title}",
                text=[
                    f"`{BOTH}` against `{CACHE}`, word by word. In the paper's figure, which is "
                    "for WikiText-2, the improvement rises towards the least frequent words."
                ],
                tables=[
                    _frequencies(scores),
                    *_compare_frequencies(scores),
                    *_count_memories(scores),
                    _examples(scores),
                ],
                figures=[_frequency_figure(scores)],
            )
        )
    return found


def _text(scores: Scores) -> list[str]:
    config = scores.config
    smoothing = scores.values("weight", method=MEMORY, part="uniform")
    adam = scores.values("has_moments_of_training")
    told = [
        f"An LSTM of {config['network']['hidden']} units reads the text once. The memory holds its "
        f"states for the last {config['memory']:,} tokens, and every method predicts each token "
        "before it is stored. Perplexity is over all tokens, including the ends of lines. "
        "Weights of mixtures are solved for on the validation text."
    ]
    if config["cache"]["window"] not in (0, config["memory"]):
        told.append(f"The cache has a window of its own: {config['cache']['window']:,} tokens.")
    seconds = scores.values("training_seconds")
    if seconds:
        told.append(f"The network was trained in {statistics.fmean(seconds):,.0f} seconds.")
    if smoothing:
        told.append(
            f"`{MEMORY}` is the neighbours' vote; {100 * statistics.fmean(smoothing):.1f}% of it "
            "is spread evenly over all words (also solved for); otherwise a word that no "
            "neighbour has would make the perplexity infinite."
        )
    if scores.values("perplexity", method=GATED):
        told.append(
            "In gated mixtures, the weights are decided per token by a gate that was fitted on the "
            "validation text; they mix adaptations of up to three reaches."
        )
    if adam:
        kept = "continues with the moments of training" if adam[0] else "starts with fresh moments"
        told.append(f"In `{ADAM}`, as tried in the paper, Adam {kept}.")
    return told


# Tables


def _perplexities(scores: Scores) -> Table:
    paper, cited, rows = PAPER.get(scores.corpus, {}), CITED.get(scores.corpus, {}), []
    networks, note = scores.networks.capitalize(), "Δ: change relative to the network alone."
    if scores.is_of_a_whole_corpus:
        networks = f"Ours: {scores.networks}"
    elif paper:
        note += " Not to be compared with the paper, which has the whole corpus."
        paper, cited = {}, {}
    for method in scores.methods:
        valid, test = (
            scores.values("perplexity", method=method, split=split) for split in ("valid", "test")
        )
        base = scores.values("perplexity", method=LSTM, split="test")
        change = [own - other for own, other in zip(test, base, strict=True)]
        ours = [_spread(valid), _spread(test), "" if method == LSTM else _signed(change)]
        rows.append([method, *ours, *_published(paper, method, LSTM)])
    for method in cited:
        rows.append([method, "", "", "", *_published(cited, method, OVER.get(method))])
    columns = ["method", "valid", "test", "Δ test", "paper: valid", "paper: test", "paper: Δ"]
    title = "Table 2: perplexity" if scores.corpus in PAPER else "Perplexity"
    return Table(
        f"{title}, {TITLES[scores.corpus]}",
        columns if paper else columns[:4],
        rows if paper else [row[:4] for row in rows],
        f"{networks}. {note}",
    )


def _published(numbers: dict[str, Numbers], method: str, base: str | None) -> list[str]:
    if method not in numbers:
        return ["", "", ""]
    valid, test = numbers[method]
    change = "" if base in (None, method) else _signed([test - numbers[str(base)][1]])
    return ["" if valid is None else f"{valid:.1f}", f"{test:.1f}", change]


def _times(scores: Scores) -> list[Table]:
    local, rows = scores.config["mbpa"], []
    taken = f"{local['steps']} step" + "s" * (local["steps"] > 1)
    looped = taken if local["rule"] == "gradient" else f"{taken} along gradients instead"
    notes = {
        LSTM: "its states, token after token",
        CACHE: "the cache alone, states given",
        MBPA: "retrieval and adaptation, states given",
        LOOP: f"autograd, {looped}, neighbours given; extrapolated from 200 tokens",
    }
    base = scores.values("seconds", method=MBPA)
    for method, what in notes.items():
        seconds = scores.values("seconds", method=method)
        if seconds and base:
            mean = statistics.fmean(seconds)
            ratio = mean / statistics.fmean(base)
            rows.append([method, what, _significant(mean), _significant(ratio)])
    if not rows:
        return []
    settings = f"{local['k']} neighbours, {'the optimum' if local['rule'] == 'map' else taken}"
    columns = ["method", "what is timed", "seconds", "of MbPA's"]
    return [Table("Time for the test text", columns, rows, f"MbPA: {settings}.")]


def _frequencies(scores: Scores) -> Table:
    rows, of = [], {"method": BOTH}
    for bucket in _buckets(scores):
        one = scores.found("improvement", bucket=bucket, **of)[0]
        seen = f"{one['least_frequent']:,} to {one['most_frequent']:,}"
        of_tokens = scores.values("improvement_of_tokens", bucket=bucket, **of)
        deviation = statistics.fmean(scores.values("improvement_deviation", bucket=bucket, **of))
        mean = statistics.fmean(scores.values("improvement", bucket=bucket, **of))
        counts = [f"{one['words']:,}", f"{one['tokens']:,}"]
        own = f"{mean:.1f} ± {deviation:.1f}".replace("-", "−")
        rows.append([str(bucket), seen, *counts, own, _spread(of_tokens)])
    return Table(
        "Fall of the perplexity by training frequency, percent",
        ["bucket", "times in training", "words", "tokens", "mean over words", "over all tokens"],
        rows,
        f"From `{CACHE}` to `{BOTH}`; negative where it rises. Words of the test text in five "
        "buckets of equal size; ± is the standard deviation over words.",
    )


def _list_compared(scores: Scores) -> list[str]:
    return [method for method in COMPARED if scores.found("improvement", method=method)]


def _describe_compared(methods: Sequence[str]) -> str:
    letters = "ABCDEFGH"
    return "; ".join(
        f"{letter}: from `{COMPARED[method]}` to `{method}`"
        for letter, method in zip(letters, methods, strict=False)
    )


def _compare_frequencies(scores: Scores) -> list[Table]:
    """Return the same for other methods, means over words and over tokens."""
    methods = _list_compared(scores)
    if len(methods) < 2:
        return []
    rows = []
    for bucket in _buckets(scores):
        cells = [
            f"{statistics.fmean(scores.values('improvement', method=method, bucket=bucket)):.2f} / "
            f"{_mean_of_tokens(scores, method, bucket):.2f}"
            for method in methods
        ]
        rows.append([str(bucket), *(cell.replace("-", "−") for cell in cells)])
    columns = ["bucket", *"ABCDEFGH"[: len(methods)]]
    weights = "; ".join(
        f"`{method}`: {' + '.join(f'{share:g} {part}' for part, share in shares.items())}"
        for method, shares in PAPER_WEIGHTS.items()
    )
    note = f"Mean over words / over all tokens. {_describe_compared(methods)}. Weights: {weights}."
    title = "Fall of the perplexity by training frequency, several mixtures, percent"
    return [Table(title, columns, rows, note)]


def _mean_of_tokens(scores: Scores, method: str, bucket: int) -> float:
    return statistics.fmean(scores.values("improvement_of_tokens", method=method, bucket=bucket))


def _count_memories(scores: Scores) -> list[Table]:
    """Return the fall by how often the memory held the word."""
    methods = _list_compared(scores)
    found = scores.found("improvement_by_memory")
    if not found:
        return []
    counts = sorted({int(str(record["times_remembered"])) for record in found})
    rows = []
    for place, least in enumerate(counts):
        of = {"times_remembered": least}
        most = counts[place + 1] - 1 if place + 1 < len(counts) else None
        told = f"{least} and more" if most is None else str(least)
        told = f"{least} to {most}" if most is not None and most > least else told
        tokens = scores.found("improvement_by_memory", method=methods[0], **of)[0]["tokens"]
        cells = [
            f"{statistics.fmean(scores.values('improvement_by_memory', method=method, **of)):.2f}"
            for method in methods
        ]
        rows.append([told, f"{tokens:,}", *(cell.replace("-", "−") for cell in cells)])
    return [
        Table(
            "Fall of the perplexity by how often the memory held the word, percent",
            ["times in memory", "tokens", *"ABCDEFGH"[: len(methods)]],
            rows,
            f"Over all tokens. {_describe_compared(methods)}.",
        )
    ]


def _examples(scores: Scores) -> Table:
    examples = [r for r in scores.results[0].metrics if r["name"] == "example"]
    rows = [
        [
            f"… {record['context']}",
            str(record["word"]),
            _significant(100 * float(str(record["before"]))),
            _significant(100 * float(str(record["after"]))),
            str(record["memories"]),
        ]
        for record in examples
    ]
    sorted_by_word = any("with_the_word" in record for record in examples)
    shown = (
        "those with the largest weight, the word itself first"
        if sorted_by_word
        else "those with the largest weight"
    )
    return Table(
        "The tokens that gained most",
        ["context", "word", "% before", "% after", "what was remembered (weight)"],
        rows,
        f"Sorted by the factor by which the probability rose. Before: `{CACHE}`; after: `{BOTH}`. "
        f"First network; each word once. Memories: {shown}; the words before the arrow, and the "
        "one that followed.",
    )


# Figures


def _curves(scores: Scores) -> list[Figure]:
    if not scores.found("training_valid_perplexity"):
        return []
    caption = (
        f"Training the network, {TITLES[scores.corpus]}: perplexity of the training text, with "
        "dropout, and of the validation text, with averaged weights, read at several positions in "
        "parallel."
    )
    return [
        Figure(
            f"language-{scores.corpus}-training",
            caption,
            lambda canvas: _draw_curves(canvas, scores),
            (7.5, 4),
        )
    ]


def _draw_curves(canvas: matplotlib.figure.Figure, scores: Scores) -> None:
    panel = canvas.subplots()
    for split, color in (("train", COLORS[LSTM]), ("valid", COLORS[MBPA])):
        for place, result in enumerate(scores.results):
            name = f"training_{split}_perplexity"
            points = [record for record in result.metrics if record["name"] == name]
            epochs = [float(str(record["epochs"])) for record in points]
            label = None if place else split
            panel.plot(epochs, [value_of(r) for r in points], "o-", color=color, label=label, ms=3)
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")
    panel.set_xlabel("epochs")
    panel.locator_params(axis="x", integer=True, min_n_ticks=1)
    panel.set_ylabel("perplexity")
    panel.legend(fontsize=8.5)


def _buckets(scores: Scores) -> list[int]:
    return sorted({int(str(record["bucket"])) for record in scores.found("improvement")})


def _frequency_figure(scores: Scores) -> Figure:
    caption = (
        f"Fall of the perplexity when MbPA joins LSTM and cache, {TITLES[scores.corpus]}, test. "
        "Bars: mean over the words of a bucket, line: one standard deviation; dots: over the "
        "bucket's tokens. Bucket 1 has the most frequent words."
    )
    return Figure(
        f"language-{scores.corpus}-frequency",
        caption,
        lambda canvas: _draw_frequencies(canvas, scores),
        (7.5, 4),
    )


def _draw_frequencies(canvas: matplotlib.figure.Figure, scores: Scores) -> None:
    panel, buckets = canvas.subplots(), _buckets(scores)

    def means(name: str) -> list[float]:
        found = (scores.values(name, bucket=bucket, method=BOTH) for bucket in buckets)
        return [statistics.fmean(values) for values in found]

    words, deviations = means("improvement"), means("improvement_deviation")
    panel.bar(buckets, words, color=COLORS[BOTH], alpha=0.35, width=0.6, label="mean over words")
    panel.errorbar(buckets, words, deviations, fmt="none", ecolor=COLORS[BOTH], capsize=3)
    dots = means("improvement_of_tokens")
    panel.plot(buckets, dots, "o", color=COLORS[MBPA], label="over all tokens")
    panel.axhline(0, color="#4d4d4d", linewidth=0.8)
    panel.set_xticks(buckets)
    panel.set_xlabel("bucket, from frequent to rare words")
    panel.set_ylabel("fall of the perplexity (%)")
    panel.legend(fontsize=8.5)


def _significant(number: float) -> str:
    """Format with at least three significant digits, never as a power of ten."""
    if not (math.isfinite(number) and number > 0):
        return f"{number:g}"
    return f"{number:,.{max(0, 2 - math.floor(math.log10(number)))}f}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if values[1:] else ""
    return f"{statistics.fmean(values):.1f}{spread}".replace("-", "−")


def _signed(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    return f"{'−' if mean < 0 else '+'}{abs(mean):.1f}"
