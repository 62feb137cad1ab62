"""Environments of verifiers' own repository, unmodified: each plays a group of episodes through the endpoint.

Their tokens and rewards are recorded as a broker takes them, and what cannot be played says why.
"""

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from gspo_services.rollout.endpoint import Calls
from gspo_services.rollout.episodes.roles import InRole
from gspo_services.rollout.rendering import Renderer, create_renderer
from gspo_services.tasks.agents import AgentResult
from tests.frameworks.played import PYTHONS, ROOT, Stage, stage, tool_call
from tests.frameworks.verifiers_rows import ENVIRONMENTS, SOLVE
from tests.support.agent_episodes import LedgerBroker, an_episode, contexts_of, sampling_of, shared_of
from tests.support.engines.scripted_engine import ScriptedEngine
from tests.unit.services.rollout.rendering.models import TAGS, make

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1200)]

HEADER = "<|im_start|>assistant\n"
Policy = Callable[[str], str]
"""What it says after a context."""
Rewards = dict[str, float]


@dataclass(frozen=True)
class Played:
    """What a group of policies says in an environment, and their rewards: by role, or by the name of the reward."""

    group: list[tuple[Policy, Rewards]]
    roles: list[str] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)
    """Besides the taskset's id."""
    taskset: str = ""
    """Where it is not the environment's own."""
    within: float = 0.0


def says(*texts: str) -> Policy:
    """The texts in turn."""
    return lambda context: texts[min(context.count(HEADER), len(texts)) - 1]


def uses(tool: str, arguments: dict[str, Any], otherwise: str = "") -> Policy:
    """Calls the tool, and says what the tool said."""

    def policy(context: str) -> str:
        found = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", context, re.DOTALL)
        return (otherwise or found[-1]) if found else tool_call(tool, json.dumps(arguments))

    return policy


def bets(context: str) -> str:
    return "I [bet]." if context.endswith(f"[check] or [bet].<|im_end|>\n{HEADER}") else "I [call]."


def proposes(*answers: str) -> Policy:
    """A problem, and the answers of its solvers in turn."""
    left = iter(answers)
    contract = json.dumps({"problem": "What is 3+4?", "answer": 7})
    return lambda context: contract if "Invent ONE" in context else next(left)


def golfs(program: str) -> Policy:
    return says(f"```python\n{program}\n```")


LOOK: Final = ("facts_lookup", {"name": "Ada Lovelace"})
WORD: Final = ("scratchpad_roundtrip", {"word": "alpha"})
STOPPED: Final = ("bash", {"command": "touch bash-tool-executed"})
NOTES: Final = tool_call("summarize", '{"notes": "She was the first."}')
PLAYED: Final = {
    "kuhn_poker": Played(
        [
            (bets, {"player0": -2.0, "player1": 2.0}),
            (says("[check]"), {"player0": -1.0, "player1": 1.0}),
            (says("?"), {"player0": -1.0, "player1": 1.0}),
        ],
        roles=["player0", "player1"],
    ),
    "proposer_solver": Played(
        [
            (proposes("7", "8"), {"proposer": 1.0, "solver-1": 1.0, "solver-2": 0.0}),
            (proposes("7", "7"), {"proposer": 0.0, "solver-1": 1.0, "solver-2": 1.0}),
        ],
        roles=["proposer", "solver-1", "solver-2"],
        env={"n": 2},
    ),
    "code_golf": Played(
        # Who is the fastest of those that are right is a matter of microseconds: both may be.
        [
            (golfs("print(5050)"), {"golfer-1": 1.5, "golfer-2": 1.5}),
            (golfs("print(5051)"), {"golfer-1": 0.0, "golfer-2": 0.0}),
        ],
        roles=["golfer-1", "golfer-2"],
        within=0.5,
    ),
    "scratchpad": Played([(uses(*WORD), {"isolated": 1.0}), (uses(*WORD, "beta"), {"isolated": 0.0})]),
    "glossary": Played([(uses(*LOOK), {"looked_up": 1.0}), (says("A poet."), {"looked_up": 0.0})]),
    "interception": Played([(says("DETERMINISTIC_BLOCK"), {"changed": 1.0}), (says("Never."), {"changed": 0.0})]),
    "reverse_text": Played([(says("<reversed_text>cba</reversed_text>"), {"lcs": 1.0}), (says("abc"), {"lcs": 0.0})]),
    "bash_interception": Played(
        [(uses(*STOPPED), {"rewritten": 1.0}), (says("Done."), {"rewritten": 0.0})],
        env={"agent": {"harness": {"id": "bash"}}},
    ),
    "compact": Played(
        [
            (lambda context: "The first computer programmer." if "Notes:" in context else NOTES, {"looked_up": 1.0}),
            (says("A poet."), {"looked_up": 0.0}),
        ],
        taskset="glossary",
        env={"agent": {"harness": {"id": "compact"}}},
    ),
}
REVERSED: Final = {"env": {"taskset": {"id": "reverse_text"}}, "task": {"idx": 0, "prompt": "abc", "answer": "cba"}}
"""Its own are in a data set on a hub."""
REFUSED: Final = {"color_codeword": "reads text only"}
"""Environments that a policy of text cannot play, and what is said."""
ROWS: Final = """
import json, sys, types
package = sys.modules["gspo"] = types.ModuleType("gspo")
package.__path__ = [f"{sys.argv[1]}/gspo"]
from gspo.tasks.integrations.verifiers import rows, vf
sys.path.append(".")
for name in sys.argv[2:]:
    print(json.dumps(next(rows({"taskset": {"id": name}}, vf.SelectConfig(limit=1)))))
"""
SAMPLING: Final = sampling_of(max_turn_tokens=2000, max_tokens=20_000, max_episode_tokens=60_000)
BIN: Final = PYTHONS / "verifiers/bin"
INDEX: Final = ("SSL_CERT_FILE", "HTTPS_PROXY", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")
"""For uv, with which harnesses of verifiers install what their programs need."""
VARIABLES: Final = {
    "PYTHONPATH": str(ENVIRONMENTS),
    "PATH": f"{BIN}:/usr/bin:/bin",
    **{name: os.environ[name] for name in INDEX if name in os.environ},
}


def engine_of(renderer: Renderer, policy: Policy) -> ScriptedEngine:
    tokenizer = renderer._tokenizer  # type: ignore[attr-defined]
    header = tuple(tokenizer.encode(HEADER))

    said: list[int] = []

    def next_token(context: Sequence[int]) -> int:
        tokens = tuple(context)
        end = max(end for end in range(len(header), len(tokens) + 1) if tokens[end - len(header) : end] == header)
        if end == len(tokens):
            said[:] = [*tokenizer.encode(policy(tokenizer.decode(list(tokens)))), min(renderer.stop_ids)]
        return said[len(tokens) - end]

    return ScriptedEngine(next_token)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return create_renderer(make(tmp_path_factory.mktemp("model"), TAGS), "template")


async def rows_of(tasksets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The first row of each, from one process: to import verifiers takes it longer than all else."""
    process = await asyncio.create_subprocess_exec(
        str(BIN / "python"), "-c", ROWS, str(ROOT), *tasksets,
        stdout=asyncio.subprocess.PIPE, cwd=ENVIRONMENTS,
    )  # fmt: skip
    printed, _ = await process.communicate()
    return dict(zip(tasksets, map(json.loads, printed.splitlines()), strict=True))


async def play(
    at: Stage, calls: dict[str, Calls], renderer: Renderer, row: dict[str, Any], played: Played, policy: Policy
) -> AgentResult:
    """One episode. Each answer is trained under what the engine was given, and each role has its reward."""
    broker, engine, key = LedgerBroker(SAMPLING), engine_of(renderer, policy), f"k{len(calls)}"
    async with an_episode(shared_of(renderer, broker, engine, roles=played.roles), broker.lease()) as episode:
        calls[key] = episode
        calls.update({f"{key}.{name}": InRole(episode, place) for place, name in enumerate(played.roles)})
        result = await at.play(row, key, roles=played.roles)
        if result.reward is None:
            return result
        await episode.finish(result.reward, components=result.components)
    assert broker.finish is not None
    given = [tuple(request.input_ids) for request in engine.requests]
    assert set(given) <= contexts_of(broker).keys()
    assert len(given) == broker.row.num_turns
    # No role of these environments has more than one conversation.
    assert len(set(broker.finish.turn_roles)) == (len(broker.sequences()) if played.roles else 0)
    taken = [result.components[played.roles[role]] for role in sorted(set(broker.finish.turn_roles))]
    assert sum(broker.finish.turn_rewards) == pytest.approx(sum(taken) if played.roles else result.reward)
    return result


async def test_environments_of_verifiers_play_groups_or_say_why_not(renderer: Renderer) -> None:
    names = {played.taskset or name for name, played in PLAYED.items()} | REFUSED.keys()
    rows = {**await rows_of(sorted(names - {"reverse_text"})), "reverse_text": REVERSED}
    calls: dict[str, Calls] = {}
    async with stage(SOLVE, "verifiers", calls=calls, environment=VARIABLES) as at:

        async def results_of(name: str, played: Played) -> list[AgentResult]:
            row = rows[played.taskset or name]
            row = {**row, "env": {**row["env"], **played.env}}
            return [await play(at, calls, renderer, row, played, policy) for policy, _ in played.group]

        found = await asyncio.gather(*(results_of(name, played) for name, played in PLAYED.items()))
        for name, told in REFUSED.items():
            result = await play(at, calls, renderer, rows[name], Played([]), says(""))
            assert (result.failure, told in result.detail) == ("raised", True), result.detail
    for (name, played), results in zip(PLAYED.items(), found, strict=True):
        for result, (_, rewards) in zip(results, played.group, strict=True):
            assert result.components == pytest.approx(rewards, abs=played.within), (name, result.detail)
