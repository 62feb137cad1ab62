from pathlib import Path

import pytest

from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a chat template, without weights."""
    return save_chat_model(tmp_path_factory.mktemp("model"), chat_tokenizer(TINY_TEMPLATE, "<|end|>"))
