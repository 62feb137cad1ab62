"""A tiny model whose template has tools, and an engine that ends answers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gspo_services.rollout.rendering import Renderer, create_renderer
from gspo_services.rollout.tokenizer import ChatTokenizer
from tests.support.engines.scripted_engine import ScriptedEngine, some_token
from tests.unit.services.rollout.rendering.models import TAGS, make

NextToken = Callable[[Sequence[int]], int]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory: Path = tmp_path_factory.mktemp("agents-model")
    return make(directory, TAGS)


@pytest.fixture(scope="session")
def renderer(tokenizer: ChatTokenizer) -> Renderer:
    return create_renderer(tokenizer, "template")


@pytest.fixture
def engine(renderer: Renderer) -> ScriptedEngine:
    return ScriptedEngine(stopping(renderer), piece_tokens=3)


def stopping(renderer: Renderer, one_in: int = 7) -> NextToken:
    """Some token, and now and then the stop token; it depends on all of the context."""
    stop = min(renderer.stop_ids)

    def next_token(context: Sequence[int]) -> int:
        return stop if (sum(context) + len(context)) % one_in == 0 else some_token(context)

    return next_token
