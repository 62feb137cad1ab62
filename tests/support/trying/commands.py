"""``gspo env try`` in a test: with keys of a configuration, and what it prints."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gspo_services.prepare.env_try.command import main

ENVIRONMENT = "tests.support.trying.tried:TriedEnvironment"
AGENT = {"agent.function": "tests.support.trying.tried:agent"}


class Tried(NamedTuple):
    """What came of the command."""

    status: int
    out: str
    err: str

    @property
    def episodes(self) -> list[Any]:
        """Those of --json."""
        return [json.loads(line) for line in self.out.splitlines()]


class Try:
    """The command in a folder of its own."""

    def __init__(self, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model = model
        self.config = folder / "my.toml"
        self._capsys = capsys

    def __call__(self, *words: str, do: str = "", **keys: Any) -> Tried:
        """Run it with these words and keys of the configuration; ``do``: what goes wrong in the user's code."""
        values = {
            "environment.name": ENVIRONMENT, "environment.options": {"do": do}, "model.path": str(self.model),
            "sampling.max_turn_tokens": 40, "sampling.max_tokens": 200, "sampling.max_episode_tokens": 800,
            "agent.workers": 1, **keys,
        }  # fmt: skip
        sections: dict[str, list[str]] = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
        text = "\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items())
        self.config.write_text(re.sub(r'{"(\w+)": (".*?")}', r"{ \1 = \2 }", text))
        status = main([str(self.config), *words])
        return Tried(status, *self._capsys.readouterr())
