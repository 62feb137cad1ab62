"""What other projects send, down to the tokens: their conversations are one sequence, in which every answer is trained."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gspo_services.rollout.rendering import Renderer, create_renderer
from tests.frameworks.framework_examples import EXAMPLES, TASK
from tests.frameworks.played import stage, tool_call
from tests.frameworks.verifiers_rows import SOLVE, TASKSETS, odd
from tests.support.agent_episodes import LedgerBroker, an_episode, contexts_of, kinds_in, sampling_of, shared_of
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.unit.services.rollout.rendering.models import TAGS, make

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1200)]


def writer(renderer: Renderer, texts: Sequence[str]) -> Callable[[Sequence[int]], int]:
    """Writes the texts, one in each turn."""
    encode = renderer._tokenizer.encode  # type: ignore[attr-defined]
    scripts = [[*encode(text), min(renderer.stop_ids)] for text in texts]
    header = tuple(encode("<|im_start|>assistant\n"))

    def next_token(context: Sequence[int]) -> int:
        tokens = tuple(context)
        ends = [end for end in range(len(header), len(tokens) + 1) if tokens[end - len(header) : end] == header]
        return scripts[len(ends) - 1][len(tokens) - ends[-1]]

    return next_token


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return create_renderer(make(tmp_path_factory.mktemp("model"), TAGS), "template")


LOOKS = [tool_call("look", '{"item": "fig"}'), "Times 7.\n" + tool_call("multiply", '{"b": 7, "a": 31}'), "217"]


@pytest.mark.parametrize(
    ("function", "home", "row", "texts"),
    [
        (SOLVE, "verifiers", odd("tools"), [tool_call("shelf_price", '{"name": "tea"}'), "It is 4.20."]),
        *((function, "agents", TASK, LOOKS) for function in EXAMPLES),
    ],
    ids=["verifiers", "openai-agents", "langgraph"],
)
async def test_a_conversation_with_tools_is_one_sequence_and_a_repetition_samples_nothing(
    renderer: Renderer, function: str, home: str, row: dict[str, Any], texts: list[str]
) -> None:
    sampling = sampling_of(max_turn_tokens=400, max_tokens=4000, max_episode_tokens=8000)
    broker, engine = LedgerBroker(sampling), ScriptedEngine(writer(renderer, texts))
    options: dict[str, Any] = {"environment": TASKSETS} if home == "verifiers" else {}
    dialogue: dict[str, Any] = {}
    async with stage(function, home, calls=dialogue, **options) as at:
        for _ in range(2):
            broker = broker.resumed()
            shared = shared_of(renderer, broker, engine)
            async with an_episode(shared, broker.lease()) as calls:
                dialogue["k1"] = calls
                result = await at.play(row)
                assert (result.reward, result.detail) == (1.0, "")
            assert len(engine.requests) == len(texts)
    (tokens,) = broker.sequences().values()
    assert kinds_in(tokens) == ["observation", "action"] * len(texts)
    assert all(engine.next_token(context) == token for context, token in contexts_of(broker).items())
