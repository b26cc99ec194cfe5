"""While the tests run, every annotation of `mbpa` is checked, by jaxtyping and beartype.

The hook must be in place before anything imports `mbpa`, hence the order below.
"""

import os
from collections.abc import Iterator
from typing import Any, Self

import hypothesis
import jaxtyping
import pytest
import torch
from beartype import BeartypeConf, FrozenDict, beartype

# As mypy reads them: an int will do for a float. `Self` is beyond beartype in a decorated method.
typechecked = beartype(
    conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({Self: Any}))
)
jaxtyping.install_import_hook("mbpa", "conftest.typechecked")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers are as many as the cores

hypothesis.settings.register_profile("mbpa", derandomize=True, deadline=None, max_examples=60)
hypothesis.settings.load_profile("mbpa")


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """For arguments that break an annotation: the library itself must refuse them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
