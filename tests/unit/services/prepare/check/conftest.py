import itertools
import sys
from pathlib import Path

import pytest

from tests.support.checking.projects import Project
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model

numbers = itertools.count()


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a chat template, without weights."""
    return save_chat_model(tmp_path_factory.mktemp("model"), chat_tokenizer(TINY_TEMPLATE, "<|end|>"))


@pytest.fixture
def project(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project in the working directory."""
    monkeypatch.chdir(tmp_path)
    # import_named appends the working directory: the next test has its own.
    monkeypatch.setattr("sys.path", [*sys.path])
    return Project(tmp_path, chat_model, f"checked_reward_{next(numbers)}")
