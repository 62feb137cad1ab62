"""Paths as people write them."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FETCHES = "`gspo run` and `gspo check` fetch it from the Hugging Face hub"
_FOLDERS = ("models", "data", "datasets", "runs", "checkpoints", "out")
"""What people call folders that are yet to be made, and nobody on the hub is called."""
_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".txt")


def way_to_model(path: Path) -> str:
    """How to get a model that is not at ``path``, for people: a name of the Hugging Face hub looks like a relative path."""
    if path.parts[:1] == ("hf:",):
        return _FETCHES
    if is_hub_name(path):
        by_hand = f"hf download {path} --local-dir models/{path.name}"
        return f'model.path = "hf://{path}" fetches it from the Hugging Face hub, as does `{by_hand}`'
    return f"`gspo model tiny {path}` makes a small model"


def way_to_rows(path: Path) -> str:
    """Likewise for rows that are not at ``path``; empty where nothing is known."""
    if path.parts[:1] == ("hf:",):
        return f"; {_FETCHES}"
    if not is_hub_name(path):
        return ""
    by_hand = f"hf download {path} --repo-type dataset --local-dir data/{path.name}"
    return f'; if it is on the Hugging Face hub, "hf://datasets/{path}" fetches it, as does `{by_hand}`'


def is_hub_name(path: Path, folder: Path = Path()) -> bool:
    """Whether ``path`` reads like owner/name on the Hugging Face hub, and is nothing in ``folder``."""
    is_one = _HUB_NAME.fullmatch(str(path)) is not None and path.parent.name not in _FOLDERS
    return is_one and path.suffix not in _FILES and not (folder / path).parent.exists()


def expanded(text: str) -> Path:
    """The path that ``text`` means, with ``~`` and ``$NAME`` filled in.

    Raises: ValueError for a variable that is not set and a home that is not known, unless a file is really called so.
    """
    path = os.path.expanduser(os.path.expandvars(text))
    if not os.path.lexists(path):
        if unset := re.search(r"\$(\w+|\{\w*\})", path):
            raise ValueError(f"{text}: the variable {unset[0]} is not set where this runs: set it, or write the path")
        if path.startswith("~"):
            raise ValueError(f"{text}: the home directory is not known: write the path")
    return Path(path)
