"""Whatever agents say: what is trained is what the engine was given, and the learner gets each sequence by itself."""

import asyncio
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gspo_services.rollout.rendering import Renderer
from tests.support.agent_episodes import LedgerBroker, an_episode, sampling_of, shared_of
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.support.policy.dialects import PATHS
from tests.support.policy.random_agents import MOST, STOPS, TEXTS, WHAT, act, learned
from tests.unit.services.rollout.episodes.conftest import stopping

SAMPLING = sampling_of(max_tokens=2000, max_episode_tokens=50_000)
ACTS = st.fixed_dictionaries(
    {
        "what": st.sampled_from(WHAT),
        "text": st.sampled_from(TEXTS),
        "tools": st.booleans(),
        "must": st.booleans(),
        "path": st.sampled_from(PATHS),
        "max_tokens": st.sampled_from(MOST),
        "stop": st.sampled_from(STOPS),
    }
)


@given(acts=st.lists(ACTS, min_size=1, max_size=6), one_in=st.sampled_from([3, 7, 1000]), piece=st.integers(1, 5))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_sampled_token_has_the_context_that_the_engine_was_given(
    renderer: Renderer, acts: list[dict[str, Any]], one_in: int, piece: int
) -> None:
    engine = ScriptedEngine(stopping(renderer, one_in), piece_tokens=piece)
    broker = LedgerBroker(SAMPLING)

    async def play() -> None:
        said: list[dict[str, Any]] = []
        async with an_episode(shared_of(renderer, broker, engine), broker.lease()) as calls:
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
