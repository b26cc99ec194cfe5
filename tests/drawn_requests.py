"""Requests that are drawn from the description of the service."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container

import hypothesis
import schemathesis

CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
    schemathesis.checks.negative_data_rejection,
]


LONG = os.environ.get("MBPA_LONG") == "1"


def draw_cases(
    schema: schemathesis.BaseSchema, skipped: Container[str] = ()
) -> Counter[tuple[str, int]]:
    """Sends requests, checks the answers, and counts them by path and status."""
    settings = hypothesis.settings(
        max_examples=300 if LONG else 10,
        derandomize=not LONG,  # so few need not hold a good one of every kind
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    drawn = Counter()
    for operation in (found.ok() for found in schema.get_all_operations()):
        if operation.path == "/explain" and not LONG:
            continue  # it takes what /predict takes
        if operation.path in skipped:
            continue
        for mode in schemathesis.GenerationMode:
            if (
                not (operation.body or operation.query)
                and mode == schemathesis.GenerationMode.NEGATIVE
            ):
                continue  # there is nothing to be wrong

            @settings
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def keeps_to_it(case):
                answer = case.call_and_validate(checks=CHECKS)
                drawn[case.operation.path, answer.status_code] += 1

            keeps_to_it()
    return drawn
