"""Claims on language modelling: section 4.3, table 2, appendix C, and the texts and networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from experiments import data
from experiments.claims.claim import (
    PRESET,
    Claim,
    Command,
    Evidence,
    Measured,
    Outcome,
    PytestNode,
    Verdict,
    cite,
    decide,
    format_all,
    format_number,
    make_untested,
    run,
    tune,
)
from experiments.results import Record

NAME = "language"
LSTM, CACHE, MBPA, BOTH = "LSTM", "LSTM + cache", "LSTM + MbPA", "LSTM + MbPA + cache"
DYNAMIC, ADAM = "LSTM + dynamic evaluation", "LSTM + dynamic evaluation (Adam)"
MARGIN = 0.1
"""Perplexity that counts as a difference with one network; the paper rounds to this."""
SHARE = 0.9
"""Share of the paper's fall that ours must reach."""
CLOSE = 1.0
"""Perplexity by which our network may be worse than the paper's."""
LITTLE = 0.1
"""Share of MbPA's own gain up to which another gain counts as nothing."""


@dataclass(frozen=True)
class Corpus:
    """One corpus: where its results are, and the paper's numbers."""

    name: str
    preset: str
    perplexity: float
    """The paper's LSTM on the test text."""
    cache: float
    """The paper's fall with the cache."""
    mbpa: float
    all_three: float
    """The smaller of the two numbers that the paper gives, in its text and in its table."""
    valid_mbpa: float
    """The paper's fall with MbPA on the validation text."""
    counts: tuple[int, int, int, int]
    """The paper's counts: training, validation and test tokens, and different words."""
    data_set: str

    def score(self, evidence: Evidence, method: str, split: str = "test") -> Measured:
        return evidence.measure(NAME, "perplexity", self.preset, method=method, split=split)

    def fall(self, evidence: Evidence, method: str) -> Measured:
        """Return by how much the method lowers the perplexity of the LSTM."""
        return self.score(evidence, LSTM) - self.score(evidence, method)

    def trials(self, evidence: Evidence, **fields: object) -> list[Record]:
        """Return the trials of MbPA that have these fields, of those on the usual text.

        A search judges its best settings again, on more tokens. These trials are left out, since
        their perplexities are of another text.
        """
        found = evidence.list_trials(NAME, self.preset, method=MBPA, rule="gradient")
        counts = [record["tokens"] for record in found]
        usual = max(set(counts), key=counts.count)
        return [
            record
            for record in found
            if record["tokens"] == usual
            and all(record[key] == value for key, value in fields.items())
        ]

    @property
    def run(self) -> Command:
        return run(NAME, self.preset)

    @property
    def search(self) -> Command:
        return tune(NAME, self.preset)


PTB = Corpus(
    name="PTB",
    preset=PRESET,
    perplexity=59.6,
    cache=4.3,
    mbpa=5.3,
    all_three=5.2,
    valid_mbpa=7.0,
    counts=(887_521, 70_390, 78_669, 10_000),
    data_set="ptb",
)
WIKITEXT = Corpus(
    name="WikiText-2",
    preset=f"{PRESET}-wikitext-2",
    perplexity=65.9,
    cache=14.6,
    mbpa=9.9,
    all_three=15.9,
    valid_mbpa=10.9,
    counts=(2_088_628, 217_646, 245_569, 33_278),
    data_set="wikitext-2",
)
CORPORA = (PTB, WIKITEXT)
RUNS = tuple(corpus.run for corpus in CORPORA)


def _is_lower(one: Measured, *others: Measured) -> bool:
    return all(other.is_above(one, MARGIN) for other in others)


def _judge_fall(corpus: Corpus, method: str, paper: float) -> Callable[[Evidence], Outcome]:
    """Return a judge of whether a method lowers the perplexity about as much as in the paper."""

    def judge(evidence: Evidence) -> Outcome:
        fall = corpus.fall(evidence, method).mean
        before, after = (corpus.score(evidence, each).format() for each in (LSTM, method))
        return decide(
            [fall >= SHARE * paper], f"{before} to {after}: −{fall:.1f} (paper −{paper:.1f})"
        )

    return judge


def _make_lstm_claim(corpus: Corpus) -> Claim:
    def judge(evidence: Evidence) -> Outcome:
        ours = corpus.score(evidence, LSTM)
        return decide([ours.mean <= corpus.perplexity + CLOSE], ours.format())

    return Claim(
        "4.3, table 2",
        f"{corpus.name}: the LSTM has a test perplexity of {corpus.perplexity}",
        f"ours is at most {CLOSE:g} higher",
        judge,
        (corpus.run,),
        (27,),
    )


def _make_fall_claim(corpus: Corpus, method: str, words: str, number: int) -> Claim:
    paper = corpus.cache if method == CACHE else corpus.mbpa
    return Claim(
        "4.3, table 2",
        f"{corpus.name}: {words} lowers it by {paper}",
        f"the fall is at least {SHARE:.0%} of the paper's",
        _judge_fall(corpus, method, paper),
        (corpus.run,),
        (number,),
    )


def _beats_cache(corpus: Corpus) -> Callable[[Evidence], Outcome]:
    def judge(evidence: Evidence) -> Outcome:
        ours, cache = (corpus.score(evidence, each) for each in (MBPA, CACHE))
        return decide([_is_lower(ours, cache)], f"MbPA {ours.format()}, cache {cache.format()}")

    return judge


def _cache_beats(evidence: Evidence) -> Outcome:
    ours, cache = (WIKITEXT.score(evidence, each) for each in (MBPA, CACHE))
    seen = f"cache {cache.format()}, MbPA {ours.format()}"
    if _is_lower(ours, cache):
        seen += "; MbPA is ahead"
    return decide([_is_lower(cache, ours)], seen)


def _cache_adds_little(evidence: Evidence) -> Outcome:
    alone, both = (PTB.score(evidence, each) for each in (MBPA, BOTH))
    gain = (alone - both).mean
    seen = f"MbPA {alone.format()}, with the cache {both.format()}"
    return decide([gain <= LITTLE * PTB.fall(evidence, MBPA).mean], seen)


def _largest_drop(evidence: Evidence) -> Outcome:
    both, *others = (WIKITEXT.score(evidence, each) for each in (BOTH, CACHE, MBPA))
    fall = WIKITEXT.fall(evidence, BOTH).mean
    seen = (
        f"all three {both.format()} (−{fall:.1f}; the paper has −15.9 in its text and −16.5 in its "
        f"table), cache {others[0].format()}, MbPA {others[1].format()}"
    )
    return decide([_is_lower(both, *others), fall >= SHARE * WIKITEXT.all_three], seen)


def _adam_gains_little(evidence: Evidence) -> Outcome:
    fall = PTB.fall(evidence, ADAM).mean
    before, after = (PTB.score(evidence, each).format() for each in (LSTM, ADAM))
    rms = PTB.fall(evidence, DYNAMIC).mean
    seen = f"{before} to {after} with Adam; with the rule of Krause et al. it falls by {rms:.1f}"
    return decide([fall <= 1], seen)


def _dynamic_gains_more(evidence: Evidence) -> Outcome:
    checks, told = [], []
    for corpus in CORPORA:
        dynamic, ours = (corpus.score(evidence, each) for each in (DYNAMIC, MBPA))
        checks.append(_is_lower(dynamic, ours))
        told.append(f"{corpus.name} {dynamic.format()}, MbPA {ours.format()}")
    return decide(checks, "dynamic evaluation " + "; ".join(told))


# Rare words


def _measure_bucket(evidence: Evidence, number: int, of_tokens: bool) -> Measured:
    name = "improvement_of_tokens" if of_tokens else "improvement"
    return evidence.measure(
        NAME, name, WIKITEXT.preset, method=BOTH, against=CACHE, split="test", bucket=number
    )


def _rare_improve(evidence: Evidence) -> Outcome:
    by_word, by_token = (_measure_bucket(evidence, 5, of_tokens) for of_tokens in (False, True))
    seen = (
        f"rarest fifth of the words: {format_number(by_word.mean, sign=True)}% averaged word by "
        f"word, as the paper does, {format_number(by_token.mean, sign=True)}% over all their tokens"
    )
    return decide([value.mean > MARGIN for value in (by_word, by_token)], seen)


def _rare_improve_more(evidence: Evidence) -> Outcome:
    checks, told = [], []
    for of_tokens, words in ((False, "word by word"), (True, "over all tokens")):
        gains = [_measure_bucket(evidence, number, of_tokens) for number in range(1, 6)]
        checks.append(gains[-1].is_above(gains[0], MARGIN))
        told.append(f"{words} {format_all(gains)}%")
    return decide(checks, f"from frequent to rare: {', '.join(told)}")


# The texts


def _counts_agree(evidence: Evidence) -> Outcome:
    checks, told = [], []
    for corpus in CORPORA:
        ours = tuple(data.SETS[corpus.data_set].counts.values())
        checks += [found == paper for found, paper in zip(ours, corpus.counts, strict=True)]
        told.append(f"{corpus.name} {' / '.join(f'{found:,}' for found in ours)}")
    seen = f"{'; '.join(told)}; ours include ends of lines, which the paper leaves out for PTB"
    return decide(checks, seen)


PTB_MBPA = _make_fall_claim(PTB, MBPA, "MbPA", 32)
WIKITEXT_MBPA = _make_fall_claim(WIKITEXT, MBPA, "MbPA", 32)
PTB_BEATS_CACHE = Claim(
    "4.3",
    "PTB: MbPA gains one point more than the cache",
    "its perplexity is clearly lower",
    _beats_cache(PTB),
    (PTB.run,),
    (28, 29),
)
LARGEST_DROP = Claim(
    "4.3, table 2",
    "WikiText-2: LSTM, MbPA and cache together have the largest drop",
    "their perplexity is clearly lower than with either alone, and the fall is at least "
    f"{SHARE:.0%} of the paper's",
    _largest_drop,
    (WIKITEXT.run,),
    (28,),
)
RARE_IMPROVE = Claim(
    "4.3",
    "WikiText-2: MbPA improves predictions for rarer words, beside LSTM and cache",
    "the rarest fifth gains, word by word and over all tokens",
    _rare_improve,
    (WIKITEXT.run,),
    (31, 32),
)

CLAIMS = (
    Claim(
        "4.3",
        "PTB has 887,521 / 70,390 / 78,669 tokens for training, validation and test and 10,000 "
        "words, WikiText-2 2,088,628 / 217,646 / 245,569 and 33,278",
        "ours have the same",
        _counts_agree,
        (PytestNode("tests/experiments/test_data.py", "test_the_published_data_pass_their_check"),),
        (30,),
    ),
    Claim(
        "B",
        "The networks have 10 million and 24 million parameters",
        "ours have",
        cite(Verdict.HOLDS, "10.0 and 24.0 million"),
        (
            PytestNode(
                "tests/experiments/test_language_training.py",
                "test_the_networks_are_as_large_as_the_papers",
            ),
        ),
        (27,),
    ),
    _make_lstm_claim(PTB),
    _make_fall_claim(PTB, CACHE, "the cache", 29),
    PTB_MBPA,
    PTB_BEATS_CACHE,
    Claim(
        "4.3, table 2",
        "PTB: the cache adds nothing to MbPA",
        "it adds at most a tenth of MbPA's own gain",
        _cache_adds_little,
        (PTB.run,),
        (28,),
    ),
    Claim(
        "4.3",
        "PTB: dynamic evaluation that goes on with Adam gains at most 1",
        "Adam lowers the perplexity by at most 1",
        _adam_gains_little,
        (PTB.run,),
    ),
    _make_lstm_claim(WIKITEXT),
    _make_fall_claim(WIKITEXT, CACHE, "the cache", 29),
    WIKITEXT_MBPA,
    Claim(
        "4.3, table 2",
        "WikiText-2: the cache gains more than MbPA",
        "its perplexity is clearly lower",
        _cache_beats,
        (WIKITEXT.run,),
        (29, 32),
    ),
    LARGEST_DROP,
    Claim(
        "table 2",
        "Dynamic evaluation (of another network, by Krause et al.) gains more than MbPA",
        "on our networks, its perplexity is clearly lower on both corpora",
        _dynamic_gains_more,
        RUNS,
    ),
    RARE_IMPROVE,
    Claim(
        "C, figure 8",
        "WikiText-2: the improvement rises towards less frequent words",
        "the rarest fifth gains clearly more than the most frequent, word by word and over all "
        "tokens",
        _rare_improve_more,
        (WIKITEXT.run,),
        (31, 32),
    ),
    make_untested(
        "C",
        "The reason may be that the cache boosts all recent words, relevant or not",
        "an explanation, for which the paper gives no measurement",
    ),
    make_untested(
        "4.3",
        "MbPA applies to any problem whose distribution shifts at test time",
        "too general for a test",
    ),
    make_untested(
        "table 2",
        "Perplexities of CharCNN, variational LSTM, AWD-LSTM and others",
        "they are quoted from other papers",
    ),
)
