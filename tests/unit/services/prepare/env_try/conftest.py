from pathlib import Path

import pytest

from tests.support.engines.chat_models import ALTERNATING_TEMPLATE, TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.trying.commands import Try


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a chat template, without weights."""
    return save_chat_model(tmp_path_factory.mktemp("model"), chat_tokenizer(TINY_TEMPLATE, "<|end|>"))


@pytest.fixture(scope="session")
def strict_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose template takes only users and assistants in turn."""
    return save_chat_model(tmp_path_factory.mktemp("strict"), chat_tokenizer(ALTERNATING_TEMPLATE, "<|end|>"))


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose distribution is far from flat, with that tokenizer."""
    from tests.support.learner.tiny_model import tiny_qwen3_moe

    directory = tmp_path_factory.mktemp("random")
    tokenizer = chat_tokenizer(TINY_TEMPLATE, "<|end|>")
    tiny_qwen3_moe(seed=1).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def tries(chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Try:
    """Runs the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return Try(chat_model, tmp_path, capsys)
