"""Report on a language model with a memory, built from the records alone."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.results import Record, Result, value_of
from experiments.sections import Section, Table

TITLES = {"wikitext-2": "WikiText-2", "python-docs": "Python documentation"}
MEMORIES = {None: "domain", "text": "text so far", "both": "both"}
BUCKETS = 5


class Scores:
    """Records of one result, by their fields."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.records = [record for result in results for record in result.metrics]
        self._values: dict[frozenset[tuple[str, object]], list[float]] = {}
        for record in self.records:
            self._values.setdefault(_fields(record), []).append(value_of(record))

    def value(self, name: str, **of: object) -> float | None:
        """Return the mean over seeds of the records with these fields; `None` if there is none.

        A field that is not named must be absent from the record, except `seed`.
        """
        found = self._values.get(frozenset({"name": name, **of}.items()))
        return sum(found) / len(found) if found else None

    def all_of(self, field: str) -> list[str]:
        """Return the values of a field, in the order of the records."""
        return list(dict.fromkeys(str(r[field]) for r in self.records if field in r))


def _fields(record: Record) -> frozenset[tuple[str, object]]:
    return frozenset((key, value) for key, value in record.items() if key != "value")


def sections(results: Sequence[Result]) -> list[Section]:
    """Return the tables of perplexities, memories, frequencies, curves and costs."""
    scores = Scores(results)
    tables = []
    for corpus in scores.all_of("corpus"):
        for network in scores.all_of("network"):
            where = {"corpus": corpus, "network": network}
            made = (
                _make_methods(scores, where),
                _make_memories(scores, where),
                _make_buckets(scores, where),
                *(_make_curve(scores, where, axis) for axis in ("tokens_read", "k", "steps")),
            )
            tables += [table for table in made if table.rows]
    text = [
        "A causal language model reads the training text of a corpus once: its states before the "
        "output layer become keys, the tokens that follow become values. `kNN-LM` mixes the model "
        "with a vote of the neighbours, `MbPA` adapts the output layer to them. Gated methods "
        "decide the weights of the mixture per token, by a linear gate on the same features, "
        "fitted on the validation text.",
        "`MbPA` decides kernel and step size per token, `MbPA (one reach)` does not. A method with "
        "`one gate` uses the same coefficients on all corpora.",
    ]
    return [Section("A language model with a memory", text, tables)]


def _make_methods(scores: Scores, where: dict[str, str]) -> Table:
    rows = []
    for method in scores.all_of("method"):
        cells = [
            _format(scores.value("perplexity", **where, method=method, split=split), 3)
            for split in ("valid", "test")
        ]
        hurt = scores.value("share_hurt", **where, method=method, split="test")
        if any(cells):
            rows.append([method, *cells, "" if hurt is None else f"{100 * hurt:.2f}"])
    return Table(
        f"{_title(where)}, memory of the domain",
        ["method", "validation", "test", "% of tokens that lose"],
        rows,
        "Perplexity per token of the model; tokens of the test text that lose more than 1 nat.",
    )


def _make_memories(scores: Scores, where: dict[str, str]) -> Table:
    rows = []
    for method in scores.all_of("method"):
        for memory in ("text", "both"):
            fields = {**where, "method": method, "memory": memory}
            cells = [
                _format(scores.value("perplexity", **fields, split=split), 3)
                for split in ("valid", "test")
            ]
            if any(cells):
                rows.append([method, MEMORIES[memory], *cells])
    return Table(
        f"{_title(where)}, memory of the text read so far",
        ["method", "memory", "validation", "test"],
        rows,
        "Perplexity. `text so far` holds what precedes a token in the scored text, `both` the "
        "domain as well; the cache is always of the text so far. Adaptation and vote have the "
        "kernels fitted with the memory of the domain, and 64 neighbours.",
    )


def _make_buckets(scores: Scores, where: dict[str, str]) -> Table:
    rows = []
    for method in scores.all_of("method"):
        fields = {**where, "method": method, "split": "test"}
        cells = [
            _format(scores.value("bucket_nats", **fields, bucket=bucket), 3)
            for bucket in range(BUCKETS)
        ]
        if any(cells):
            rows.append([method, *cells])
    return Table(
        f"{_title(where)}, tokens by frequency in the domain",
        ["method", "rarest", "2", "3", "4", "most frequent"],
        rows,
        "Mean −log p of the test text's tokens, in five buckets of equal size by how often the "
        "token occurs in the training text.",
    )


def _make_curve(scores: Scores, where: dict[str, str], axis: str) -> Table:
    points = sorted(
        {
            int(str(record[axis]))
            for record in scores.records
            if axis in record and all(record[key] == value for key, value in where.items())
        }
    )
    rows = []
    for method in scores.all_of("method"):
        fields = {**where, "method": method, "split": "valid"}
        cells = [_format(scores.value("curve", **fields, **{axis: point}), 3) for point in points]
        if any(cells):
            rows.append([method, *cells])
    names = {"tokens_read": "tokens read", "k": "neighbours", "steps": "steps"}
    return Table(
        f"{_title(where)}, by {names[axis]}",
        ["method", *(f"{point:,}" for point in points)],
        rows,
        "Perplexity of a part of the validation text, with a gate fitted to each point.",
    )


def _title(where: dict[str, str]) -> str:
    return f"{TITLES.get(where['corpus'], where['corpus'])}, {where['network']} network"


def _format(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
