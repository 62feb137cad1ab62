"""An episode whose policy plays several roles: whose conversation is whose, and whose reward is which."""

from typing import Any

import pytest

from gspo_services.rollout.endpoint import CallRefused, CallRequest
from gspo_services.rollout.episodes import EpisodeRegistry, WrongTurns
from gspo_services.rollout.rendering import Renderer
from tests.support.agent_episodes import LedgerBroker, an_episode, ask, echoed, sampling_of, shared_of, user
from tests.support.engines.scripted_engine import ScriptedEngine

SAMPLING = sampling_of()
ROLES = ("white", "black")


async def play(broker: LedgerBroker, renderer: Renderer, engine: ScriptedEngine, **result: Any) -> None:
    """Two moves of white, and one of black between them."""
    async with an_episode(shared_of(renderer, broker, engine, roles=ROLES), broker.lease()) as calls:
        opened = await ask(calls, [user("a")], role=0)
        await ask(calls, [user("a")], role=1)
        await ask(calls, [user("a"), echoed(opened), user("b")], role=0)
        await calls.finish(**result)


async def test_each_role_has_its_sequences_and_its_reward(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker = LedgerBroker(SAMPLING)
    await play(broker, renderer, engine, reward=0.0, components={"white": 1.0, "black": -1.0})
    assert broker.finish is not None
    assert (broker.finish.turn_roles, broker.finish.turn_rewards) == ([0, 1, 0], [0.0, -1.0, 1.0])
    assert [entry["call"]["sequence"] for entry in broker.entries] == [0, 1, 0]
    assert [entry["call"].get("role") for entry in broker.entries] == [None, 1, None]


async def test_a_role_continues_no_other_roles_conversation(renderer: Renderer, engine: ScriptedEngine) -> None:
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine, roles=ROLES), broker.lease()) as calls:
        opened = await ask(calls, [user("a")], role=0)
        await ask(calls, [user("a"), echoed(opened), user("b")], role=1)
    assert [entry["call"]["sequence"] for entry in broker.entries] == [0, 1]


async def test_one_number_is_the_reward_of_each_role_and_turns_have_their_own(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    for result, rewards in (({"reward": 0.5}, [0.0, 0.5, 0.5]), ({"reward": 6.0, "turns": [1, 2, 3]}, [1.0, 2.0, 3.0])):
        broker = LedgerBroker(SAMPLING)
        await play(broker, renderer, engine, **result)
        assert broker.finish is not None
        assert (broker.finish.turn_roles, broker.finish.turn_rewards) == ([0, 1, 0], rewards)


async def test_a_killed_episode_has_the_same_roles_and_what_it_does_not_repeat_is_nobodys(
    renderer: Renderer, engine: ScriptedEngine
) -> None:
    whole = LedgerBroker(SAMPLING)
    await play(whole, renderer, engine, reward=0.0, components={"white": 1.0, "black": -1.0})
    assert whole.finish is not None
    for kept in range(len(whole.messages)):
        broker = LedgerBroker(SAMPLING)
        chunks = iter(whole.chunks)
        for message in whole.messages[:kept]:
            broker.take(message, next(chunks)[1] if type(message).__name__ == "Chunk" else {})
        await play(broker, renderer, ScriptedEngine(engine.next_token), reward=0.0, components={"white": 1.0, "black": -1.0})
        assert broker.finish is not None
        assert (broker.finish.turn_roles, broker.finish.turn_rewards) == (whole.finish.turn_roles, whole.finish.turn_rewards)


@pytest.mark.parametrize(
    ("components", "text"),
    [({"white": 1.0}, 'has played "black"'), ({"white": 1.0, "black": 0.0, "green": 1.0}, 'it rewards "green"')],
)
async def test_a_role_without_a_reward_and_a_reward_without_a_role_are_refused(
    renderer: Renderer, engine: ScriptedEngine, components: dict[str, float], text: str
) -> None:
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine, roles=ROLES), broker.lease()) as calls:
        for role in (0, 1):
            await ask(calls, [user("a")], role=role)
        with pytest.raises(WrongTurns, match=text):
            await calls.finish(1.0, components=components)


async def test_a_role_that_never_plays_needs_no_reward_and_may_have_one(renderer: Renderer, engine: ScriptedEngine) -> None:
    for components in ({"white": 1.0}, {"white": 1.0, "black": 5.0}):
        broker = LedgerBroker(SAMPLING)
        async with an_episode(shared_of(renderer, broker, engine, roles=ROLES), broker.lease()) as calls:
            await ask(calls, [user("a")], role=0)
            await calls.finish(sum(components.values()), components=components)
        assert broker.finish is not None
        assert broker.finish.turn_rewards == [1.0]


async def test_keys_name_the_role(renderer: Renderer, engine: ScriptedEngine) -> None:
    registry = EpisodeRegistry("model", ROLES)
    broker = LedgerBroker(SAMPLING)
    async with an_episode(shared_of(renderer, broker, engine, roles=ROLES), broker.lease()) as calls:
        key = registry.add(calls)
        request = CallRequest(messages=[user("a")])
        black = registry.calls_of(f"{key}.black")
        assert black is registry.calls_of(f"{key}.black")
        assert [piece async for piece in black.call(request)]
        assert (black.temperature, black.can_demand(request)) == (calls.temperature, True)
        assert await black.count(request) == await calls.count(request)
        assert broker.entries[0]["call"]["role"] == 1
        with pytest.raises(CallRefused, match=r'episode.role\("white"\)'):
            registry.calls_of(key).call(request)
        for wrong, text in (
            (f"{key}.green", "no role is called 'green': agent.roles are white, black"),
            ("x.white", "no episode"),
        ):
            with pytest.raises(CallRefused, match=text):
                registry.calls_of(wrong)
        registry.remove(key)
        with pytest.raises(CallRefused, match="has ended"):
            registry.calls_of(f"{key}.black")
