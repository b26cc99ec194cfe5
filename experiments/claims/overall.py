"""Claims of abstract, introduction and conclusion, most of which sum up others."""

from __future__ import annotations

from experiments.claims import continual, images, language
from experiments.claims.claim import make_untested, summarize_claims

CLAIMS = (
    summarize_claims("abstract", "MbPA alleviates catastrophic forgetting", continual.BEATS_MLP),
    summarize_claims(
        "abstract",
        "It acquires new knowledge fast and stably",
        images.OUTPERFORMS,
        images.IS_FASTER,
        images.LEARNS_FROM_FEW,
        images.KEEPS_OLD,
    ),
    summarize_claims(
        "abstract, conclusion",
        "It counters imbalanced class labels",
        images.WINS_UNBALANCED,
        images.WIDER_GAP,
        images.SUITS_SCARCITY,
    ),
    summarize_claims(
        "abstract, conclusion",
        "It learns during evaluation: large gains over LSTMs, and on top of the cache",
        language.PTB_MBPA,
        language.WIKITEXT_MBPA,
        language.LARGEST_DROP,
    ),
    summarize_claims(
        "3",
        "It competes with shallow mixing and often works better (PTB, ImageNet)",
        language.PTB_BEATS_CACHE,
        images.OUTPERFORMS,
    ),
    summarize_claims(
        "conclusion",
        "In continual learning it is comparable to EWC or, in many cases, better",
        continual.BEATS_EWC,
        continual.SWITCHES,
    ),
    summarize_claims(
        "3, 4",
        "It does not depend on the domain or on the network: here an MLP, a ResNet and two LSTMs",
        continual.BEATS_MLP,
        images.OUTPERFORMS,
        language.PTB_MBPA,
        language.WIKITEXT_MBPA,
    ),
    make_untested(
        "conclusion",
        "It adapts rapidly to new classes in large-scale image classification",
        "Tiny ImageNet has 200 classes; [imagenet.md](imagenet.md) has the commands for all 1,000",
    ),
    make_untested(
        "1",
        "The adaptation is efficient",
        "the paper gives no times; ours are in [engine.md](engine.md) and "
        "[experiments.md](experiments.md#language-modelling)",
    ),
    make_untested(
        "1",
        "Networks, people and animals learn as the theory of complementary learning systems says",
        "background, not a result of the paper",
    ),
)
