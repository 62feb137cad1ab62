"""What the guide shows of each framework runs as it stands there."""

import ast

import pytest

from tests.frameworks.forms.page import BLOCKS
from tests.frameworks.played import QUIET, Dialogue, reply_of, stage

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1200)]

HOMES = {
    "forms": ["openai", "anthropic", "openai-agents", "pydantic-ai", "smolagents", "litellm", "langgraph", "instructor"],
    "more": ["llama-index", "autogen-agentchat", "strands-agents", "dspy", "crewai", "ag2"],
}
"""Which of the environments has which frameworks: not all of them agree on their requirements."""
FORMAT = {"dspy": "[[ ## answer ## ]]\n7\n\n[[ ## completed ## ]]"}
MOST_LINES = 10


def test_the_page_shows_each_framework_in_ten_lines() -> None:
    assert [*BLOCKS] == [name for names in HOMES.values() for name in names]
    for name, block in BLOCKS.items():
        ast.parse(block)
        assert len([line for line in block.splitlines() if line]) <= MOST_LINES, name


@pytest.mark.parametrize("home", HOMES)
async def test_what_the_guide_shows_runs_right_and_wrong_and_talks_to_nobody_else(home: str) -> None:
    failed = {}
    dialogues = {name: Dialogue(reply_of(FORMAT.get(name, "7"))) for name in HOMES[home]}
    async with stage("tests.frameworks.forms.page:solve", home, calls=dialogues, environment=QUIET) as at:
        for name, dialogue in dialogues.items():
            for answer, reward in (("7", 1.0), ("8", 0.0)):
                result = await at.play({"form": name, "question": "What is fig?", "answer": answer}, name)
                if (result.reward, bool(dialogue.requests)) != (reward, True):
                    failed[name] = result.detail or str(result.reward)
    assert failed == {}
