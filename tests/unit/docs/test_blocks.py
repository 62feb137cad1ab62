"""Every block of the documentation says its language; its TOML, JSON and YAML is read as users' files are."""

import json
import re
import tomllib
from pathlib import Path
from typing import Final

import pytest
import yaml

from gspo_services.shared.settings import Settings
from gspo_services.tasks.environments.registry import find_task_set, read_options
from tests.support.pages import PAGES, Block, blocks, name_of, tokens

CHECKED: Final = {"python", "pycon", "bash", "console", "toml", "json", "yaml", "http"}
PLAIN: Final = {"text", "dockerfile"}
"""Diagrams, formulas and output; and what no test here can build."""


def place_of(block: Block) -> str:
    return block.place


def test_every_block_is_fenced_and_says_its_language() -> None:
    indented = [
        f"{name_of(page)}:{token.map[0] + 1}"
        for page in PAGES
        for token in tokens(page)
        if token.type == "code_block" and token.map
    ]
    assert indented == [], "fence these blocks and name their language, such as ```bash"
    unknown = [f"{block.place}: {block.language!r}" for block in blocks() if block.language not in CHECKED | PLAIN]
    assert unknown == [], f"expected one of {sorted(CHECKED | PLAIN)}"
    assert {block.language for block in blocks()} == CHECKED | PLAIN


def read(block: Block, environment: str = "") -> str:
    """Read settings and the environment's options; return the environment's name, which is ``environment`` if none is shown.

    Raises: ValueError for what a configuration may not say.
    """
    shown = tomllib.loads(block.text)
    assert shown
    Settings.model_validate(shown)
    section = shown.get("environment", {})
    name = section.get("name", environment)
    if name and ":" not in name and "options" in section:
        read_options(name, find_task_set(name).options_type, section["options"])
    return str(name)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_that_are_shown_are_accepted(page: Path) -> None:
    environment = ""
    for block in blocks("toml", pages=(page,)):
        try:
            environment = read(block, environment)
        except ValueError as error:
            pytest.fail(f"{block.place}: {error}")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[batch]\nmax_lags = 2", "max_lags"),
        ('[environment]\nname = "dataset"\noptions = {train_pth = "a"}', "has no option train_pth"),
        ("[batch", "Expected"),
    ],
)
def test_a_setting_that_is_not_there_is_found(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        read(Block("planted", "toml", text))


@pytest.mark.parametrize("block", blocks("json", "http", "yaml"), ids=place_of)
def test_data_that_is_shown_is_read(block: Block) -> None:
    if block.language == "yaml":
        assert yaml.safe_load(block.text)
        return
    values = re.findall(r"^\{.*?\}$", block.text, re.MULTILINE | re.DOTALL)
    assert values
    assert all(isinstance(json.loads(value), dict) for value in values)
