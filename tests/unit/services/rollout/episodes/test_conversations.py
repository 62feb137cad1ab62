"""Whatever agents say: what is trained is what the engine was given, and the learner gets each sequence by itself."""

import asyncio
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.messages import Batch, BatchItem
from services.learner.broker import groups_of
from services.rollout.rendering import Renderer
from tests.support.agent_episodes import LedgerBroker, an_episode, ask, echoed, sampling_of, shared_of, user
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.unit.services.rollout.episodes.conftest import stopping

SAMPLING = sampling_of(max_tokens=2000, max_episode_tokens=50_000)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TEXTS = ("a", "Grüße\n", "<|im_end|>", '{"x": 1}', "")
ACTS = st.fixed_dictionaries(
    {
        "what": st.sampled_from(["go on", "go on", "go on", "edit", "compact", "twice", "fork"]),
        "text": st.sampled_from(TEXTS),
        "tools": st.booleans(),
        "max_tokens": st.sampled_from([None, None, 1, 3]),
        "stop": st.sampled_from([(), (), ("e",)]),
    }
)


async def act(calls: Any, said: list[dict[str, Any]], what: dict[str, Any]) -> list[dict[str, Any]]:
    """One act of an agent: what the conversation is after it."""
    fields = {"tools": [TOOL] if what["tools"] else [], "max_tokens": what["max_tokens"], "stop": what["stop"]}
    if what["what"] == "edit" and said:
        said = [{**said[0], "content": said[0]["content"] + "!"}, *said[1:]]
    elif what["what"] == "compact":
        said = []
    elif what["what"] == "fork":
        said = said[:2]
    said = [*said, user(what["text"])]
    if what["what"] == "twice":
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(ask(calls, said, **fields)) for _ in range(2)]
        return [*said, echoed(answers[1].result())]
    return [*said, echoed(await ask(calls, said, **fields))]


def learned(broker: LedgerBroker) -> Any:
    """The sequences that the learner makes of the episode."""
    assert broker.finish is not None
    _, arrays = broker.lease()
    arrays = {name: arrays[name] for name in Batch.ARRAYS}
    arrays["turn_rewards"] = np.asarray(broker.finish.turn_rewards)
    item = BatchItem(
        7, 3, broker.row.num_tokens, len(arrays["segments"]), len(arrays["version_runs"]), broker.row.num_turns, "done"
    )
    batch = Batch(index=0, policy_version=1, temperature=0.7, items=[item])
    batch.check_arrays(arrays)
    (group,) = groups_of(batch, arrays)
    return group.sequences


@given(acts=st.lists(ACTS, min_size=1, max_size=6), one_in=st.sampled_from([3, 7, 1000]), piece=st.integers(1, 5))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_sampled_token_has_the_context_that_the_engine_was_given(
    renderer: Renderer, acts: list[dict[str, Any]], one_in: int, piece: int
) -> None:
    engine = ScriptedEngine(stopping(renderer, one_in), piece_tokens=piece)
    broker = LedgerBroker(SAMPLING)

    async def play() -> None:
        said: list[dict[str, Any]] = []
        async with an_episode(shared_of(renderer, broker, engine, SAMPLING), broker.lease()) as calls:
            for each in acts:
                said = await act(calls, said, each)
            await calls.finish(1.0)

    asyncio.run(play())
    requested = {tuple(request.input_ids) for request in engine.requests}
    sequences = learned(broker)
    assert len(sequences) == len(broker.sequences())
    num_actions = 0
    for sequence in sequences:
        ids = sequence.token_ids.tolist()
        for place in np.flatnonzero(sequence.action_mask).tolist():
            assert engine.next_token(ids[:place]) == ids[place]
            if not sequence.action_mask[place - 1]:
                assert tuple(ids[:place]) in requested
                num_actions += 1
    assert num_actions == len(engine.requests) == broker.row.num_turns
