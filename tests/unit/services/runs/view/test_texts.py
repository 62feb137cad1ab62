"""Each token has a text of its own, whatever bytes it stands for."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer
from gspo_services.runs.view.texts import Texts
from gspo_services.shared.settings.configuration import load_settings


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory without settings, whose export has a byte-level tokenizer: id 0 to 255 in its own order."""
    directory = tmp_path_factory.mktemp("texts")
    build_tokenizer().save_pretrained(directory / "export")
    (directory / "export" / "config.json").write_text(json.dumps({"vocab_size": 264, "eos_token_id": 0}))
    return directory


def ids_of(texts: Texts, text: bytes) -> list[int]:
    """The ids of bytes, by what each byte-token decodes to."""
    assert texts.load()
    by_byte = {texts._piece(token_id): token_id for token_id in range(264)}
    return [by_byte[bytes([byte])] for byte in text]


def test_a_character_of_several_tokens_belongs_to_the_last_of_them(export: Path) -> None:
    texts = Texts(export)
    assert texts.of(ids_of(texts, "aé€b".encode())) == ["a", "", "é", "", "", "€", "b"]


def test_bytes_that_are_not_utf8_become_a_replacement_and_lose_nothing_else(export: Path) -> None:
    texts = Texts(export)
    found = texts.of(ids_of(texts, b"a\xffb\xe2\x82"))
    assert found[0] == "a"
    assert "".join(found) == "a\ufffdb\ufffd"


def test_markup_stays_the_text_that_it_is(export: Path) -> None:
    texts = Texts(export)
    hostile = '<script>alert(1)</script>"&'
    assert texts.text(ids_of(texts, hostile.encode())) == hostile


def test_ids_outside_the_vocabulary_have_no_text(export: Path) -> None:
    texts = Texts(export)
    assert texts.of([2**31 - 1, -5, *ids_of(texts, b"a")]) == ["", "", "a"]


def test_a_runs_own_export_comes_before_a_path_that_may_mean_another_model_here(export: Path, tmp_path: Path) -> None:
    other = tmp_path / "models" / "tiny"
    shutil.copytree(export / "export", other)
    Tokenizer(models.WordLevel({"<|end|>": 0, "wrong": 1}, unk_token="<|end|>")).save(str(other / "tokenizer.json"))
    (tmp_path / "settings.json").write_text(load_settings(None, [f"model.path={other}"], {}).model_dump_json())
    texts = Texts(tmp_path)
    assert texts.text([1]) == "wrong", texts.error
    shutil.copytree(export / "export", tmp_path / "export")
    texts = Texts(tmp_path)
    assert texts.text(ids_of(texts, b"right")) == "right"


def test_without_a_tokenizer_ids_are_shown_and_the_reason(tmp_path: Path) -> None:
    texts = Texts(tmp_path)
    assert texts.of([1, 2]) == ["", ""]
    assert texts.special_ids == frozenset()
    assert "Token ids are shown without text" in texts.error
