"""A mutational fuzzer that keeps the inputs which reach new code.

For every feature (a transition between lines, or a kind of outcome) the fuzzer keeps the smallest
input that shows it. An input that is smallest for no feature leaves the corpus. New inputs are
mutations of the corpus. With a fixed number of cases, a run depends only on its seed. With a time
limit, it is the beginning of the same run, cut off when the time is up.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from reliability.fuzzing.coverage import ArcTracer
from reliability.fuzzing.limits import CaseTimeoutError, MemoryMeter, interrupt_after
from reliability.fuzzing.mutators import Mutator, make_token_mutator, mutate

SLOW_CASE_S = 1.0
CASE_TIMEOUT_S = 20.0
MAX_SHRINKING_CASES = 400
MAX_FINDINGS = 50  # distinct findings after which a run ends: something is broken throughout
SHRINKING_TIMEOUT_S = 10.0
OUTCOME_WORDS = 8
MAX_OUTCOMES = 300  # outcomes that count as features; more would be parts of inputs in messages

Check = Callable[[bytes], str]
"""Tries one input and returns a short description of the outcome; raises if a promise breaks."""
Opening = Callable[[Path], contextlib.AbstractContextManager[Check]]
"""Opens a `Check` that may use the given empty directory."""


@dataclass(frozen=True)
class Target:
    """Something to fuzz.

    Args:
        name: name on the command line.
        seeds: returns the first inputs.
        open: opens the check.
        traced: parts of paths of the files whose coverage guides the search.
        untraced: parts of paths to exclude from these.
        tokens: byte strings that are common in the format.
        mutators: mutators that know the format.
        structured_share: share of mutations made by `mutators`.
        memory_bytes: maximum growth of resident memory in a case.
        has_threads: whether the check works in threads of its own.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    open: Opening
    traced: tuple[str, ...]
    untraced: tuple[str, ...] = ()
    tokens: tuple[bytes, ...] = (b"\0",)
    mutators: tuple[Mutator, ...] = ()
    structured_share: float = 0.5
    memory_bytes: int = 64 << 20
    has_threads: bool = False


@dataclass(frozen=True)
class Finding:
    """An input that breaks a promise.

    Args:
        kind: "exception", "slow", "memory", "timeout" or "crash".
        signature: equal for inputs that fail in the same way at the same place.
        message: what happened, with the traceback if there is one.
        data: the input.
    """

    kind: str
    signature: str
    message: str
    data: bytes

    def save(self, folder: Path, target: str) -> Path:
        """Write the input and its description; return the path of the input."""
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(self.signature.encode()).hexdigest()[:12]
        path = folder / f"{target}-{self.kind}-{name}.case"
        path.write_bytes(self.data)
        path.with_suffix(".txt").write_text(
            f"{self.signature}\n\n{self.message}\n", encoding="utf-8", errors="backslashreplace"
        )
        return path


@dataclass
class Outcome:
    """The outcome of one case."""

    features: set[Hashable]
    finding: Finding | None
    seconds: float
    growth_bytes: int


@dataclass
class Summary:
    """The figures of a run."""

    cases: int = 0
    seconds: float = 0.0
    features: int = 0
    corpus: int = 0
    slowest_case_s: float = 0.0
    largest_growth_bytes: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def as_figures(self) -> dict[str, Any]:
        """Return JSON values, with one line per finding."""
        return {
            "cases": self.cases,
            "cases_per_second": round(self.cases / max(self.seconds, 1e-9), 1),
            "features": self.features,
            "corpus": self.corpus,
            "slowest_case_s": round(self.slowest_case_s, 3),
            "largest_growth_mib": round(self.largest_growth_bytes / 2**20, 1),
            "outcomes": len(self.outcomes),
            "findings": [f"{each.kind}: {each.signature}" for each in self.findings],
        }


class Fuzzer:
    """Runs one target from one seed.

    Args:
        target: the target to fuzz.
        check: the check opened by `target.open`.
        seed: seed of all random choices.
        announce: called with each input before it is tried, so that an input that kills the process
            is known.
        tracer: the tracer that watches the threads of `check`, if there is one.
        slow_case_s: seconds beyond which a case is a finding.
    """

    def __init__(
        self,
        target: Target,
        check: Check,
        *,
        seed: int,
        announce: Callable[[bytes], None] = lambda data: None,
        tracer: ArcTracer | None = None,
        slow_case_s: float = SLOW_CASE_S,
    ) -> None:
        self._slow_case_s = slow_case_s
        self._target, self._check, self._announce = target, check, announce
        self._random = Random(f"{target.name} {seed}")
        self._tracer = tracer or ArcTracer(target.traced, target.untraced)
        self._place_token = make_token_mutator(target.tokens)
        self._meter = MemoryMeter()
        self._best: dict[Hashable, bytes] = {}
        self._corpus: list[bytes] = []
        self.summary = Summary()

    @property
    def corpus(self) -> list[bytes]:
        """Inputs that are smallest for some feature."""
        return list(self._corpus)

    def run(self, *, cases: int | None = None, seconds: float | None = None) -> Summary:
        """Try cases until a limit is reached or there are too many findings."""
        start = time.perf_counter()
        end = None if seconds is None else start + seconds
        summary = self.summary
        seeds = list(self._target.seeds())
        while (cases is None or summary.cases < cases) and len(summary.findings) < MAX_FINDINGS:
            if end is not None and time.perf_counter() > end:
                break
            self._try(seeds.pop(0) if seeds else self._draw())
        self._meter.close()
        summary.seconds = time.perf_counter() - start
        summary.features, summary.corpus = len(self._best), len(self._corpus)
        return summary

    def execute(self, data: bytes, *, is_traced: bool = True) -> Outcome:
        """Try one input and return its outcome."""
        finding, outcome = None, ""
        self._announce(data)
        self._meter.start()
        start = time.perf_counter()
        tracing = self._tracer if is_traced else contextlib.nullcontext()
        try:
            with interrupt_after(CASE_TIMEOUT_S), tracing:
                outcome = self._check(data)
        except CaseTimeoutError:
            message = f"not done after {CASE_TIMEOUT_S} s\n{traceback.format_exc()}"
            finding = Finding("timeout", "no answer in time", message, data)
        except Exception as error:
            message = "".join(traceback.format_exception(error))
            finding = Finding("exception", describe_error(error), message, data)
        seconds = time.perf_counter() - start
        growth = self._meter.measure_growth_bytes()
        if finding is None and growth > self._target.memory_bytes:
            message = f"{growth:,} bytes for an input of {len(data):,}"
            finding = Finding("memory", f"more memory than allowed: {outcome}", message, data)
        features = self._tracer.features() if is_traced else set()
        counts = self.summary.outcomes
        if finding is None and (outcome in counts or len(counts) < MAX_OUTCOMES):
            counts[outcome] = counts.get(outcome, 0) + 1
            features.add(outcome)
        return Outcome(features, finding, seconds, growth)

    def _draw(self) -> bytes:
        if not self._corpus:
            return self._random.randbytes(self._random.randrange(64))
        first, second = self._random.choice(self._corpus), self._random.choice(self._corpus)
        target = self._target
        share = target.structured_share if target.mutators else 0.0
        return mutate(self._random, first, second, target.mutators, self._place_token, share)

    def _try(self, data: bytes) -> None:
        summary, outcome = self.summary, self.execute(data)
        summary.cases += 1
        seconds, finding = outcome.seconds, outcome.finding
        if finding is None and seconds > self._slow_case_s:  # tracing may be the cause
            seconds = self.execute(data, is_traced=False).seconds
            if seconds > self._slow_case_s:
                finding = Finding("slow", "a case takes too long", f"{seconds:.2f} s", data)
        summary.slowest_case_s = max(summary.slowest_case_s, seconds)
        summary.largest_growth_bytes = max(summary.largest_growth_bytes, outcome.growth_bytes)
        if finding is None:
            self._keep(data, outcome.features)
        elif all(finding.signature != known.signature for known in summary.findings):
            summary.findings.append(self._shrink(finding))

    def _keep(self, data: bytes, features: set[Hashable]) -> None:
        """Keep the input as the example of each feature that no smaller input shows."""
        is_better = False
        for feature in features:
            known = self._best.get(feature)
            if known is None or len(data) < len(known):
                self._best[feature] = data
                is_better = True
        if is_better:
            self._corpus = sorted(set(self._best.values()))  # sets have no defined order

    def _shrink(self, finding: Finding) -> Finding:
        """Remove parts of the input that are not needed to fail in the same way."""
        if finding.kind in ("slow", "timeout"):
            return finding
        end = time.perf_counter() + SHRINKING_TIMEOUT_S
        left, size = MAX_SHRINKING_CASES, len(finding.data) // 2
        while size and left and time.perf_counter() < end:
            at, is_smaller = 0, False
            while at < len(finding.data) and left and time.perf_counter() < end:
                left -= 1
                shorter = finding.data[:at] + finding.data[at + size :]
                found = self.execute(shorter, is_traced=False).finding
                if found is not None and found.signature == finding.signature:
                    finding, is_smaller = found, True
                else:
                    at += size
            size = min(size, len(finding.data)) if is_smaller else size // 2
        return finding


def describe_error(error: Exception) -> str:
    """Return the type of an error, its innermost frame and its message without particulars."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = [frame for frame in frames if "/reliability/" not in frame.filename.replace("\\", "/")]
    frame = (inner or list(frames))[-1]
    where = f"{Path(frame.filename).name}, {frame.name}"
    return f"{type(error).__name__} in {where}: {remove_particulars(str(error))}"


def summarise_message(message: str) -> str:
    """Return the first words of a message, up to where it quotes the input.

    This distinguishes fewer kinds than `remove_particulars`. Each kind counts as a feature, and one
    that contained parts of the input would make every input look new.
    """
    plain = re.sub(r"/[\w./-]+", " ", message)
    plain = re.split(r"['\"`(\[{]|\bgot\b|\bbut\b", plain, maxsplit=1)[0]
    return " ".join(re.findall(r"\b[A-Za-z]{1,20}\b", plain)[:OUTCOME_WORDS])


def remove_particulars(message: str) -> str:
    """Return a message without quoted text, numbers and paths, so that equal kinds match."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "…", message)
    text = re.sub(r"/[\w./-]+", "/…", text)
    text = re.sub(r"0x[0-9a-f]+|[0-9a-f]{16,}|-?\d[\d,.e+-]*", "#", text)
    return " ".join(text.split())[:160]
