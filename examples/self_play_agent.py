"""A policy that plays against itself: two players each name a number of one or two digits, and the larger one wins.

    gspo run examples/arithmetic.toml --set agent.function=examples.self_play_agent:solve \
        --set 'agent.roles=["white", "black"]' --set objective.advantage=role

A task with an "opponent" is a game of white against that number: held-out tasks with answers of the start model show by how
much the policy beats it.
"""

import re

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gspo.tasks.agents import Episode, Role

HTTP = DefaultAsyncHttpxClient()
"""One for all episodes of this process: to make one takes longer than a call."""


async def solve(episode: Episode) -> "dict[str, float]":
    """One game. Returns the reward of each role that has played: 1 for a win, -1 for a loss, 0 for a draw."""
    white = await said_by(episode.role("white"), episode.task["problem"])
    if "opponent" in episode.task:
        return {"white": won(white, episode.task["opponent"])}
    black = await said_by(episode.role("black"), episode.task["problem"])
    return {"white": won(white, black), "black": won(black, white)}


async def said_by(player: Role, question: str) -> str:
    """What the policy answers in one of its roles."""
    client = AsyncOpenAI(base_url=player.base_url, api_key=player.api_key, http_client=HTTP)
    answer = await client.chat.completions.create(model=player.model, messages=[{"role": "user", "content": question}])
    return answer.choices[0].message.content or ""


def won(own: str, other: str) -> float:
    """1 when ``own`` is the larger number, -1 when it is the smaller one or none, 0 when neither is larger."""
    mine, theirs = number_in(own), number_in(other)
    return float(mine > theirs) - float(mine < theirs)


def number_in(text: str) -> int:
    """The number that ``text`` is; -1 for anything else than one or two digits."""
    return int(text) if re.fullmatch(r"[0-9]{1,2}", text.strip()) else -1
