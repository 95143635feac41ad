"""The server that these tests ask."""

import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.server.preparation import Preparer
from tests.helpers import dialects
from tests.helpers.calling import HERMES, calling


@pytest.fixture(scope="module")
def served(demo: ModelInfo) -> ModelInfo:
    return calling(demo, HERMES)


@pytest.fixture(scope="module")
def preparer(served: ModelInfo) -> Preparer:
    return dialects.preparer(served)


@pytest.fixture(scope="module")
def thinking(demo: ModelInfo) -> ModelInfo:
    """A model whose answers may begin with reasoning."""
    return calling(demo, HERMES + "{# <think> </think> #}")
