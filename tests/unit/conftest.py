"""The model that these tests serve."""

from __future__ import annotations

import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose


@pytest.fixture(scope="session")
def demo() -> ModelInfo:
    """The demo pair's target, with a short context."""
    return ModelInfo.of(decide(compose(["model.context=100"])))
