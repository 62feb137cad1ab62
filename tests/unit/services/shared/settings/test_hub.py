"""Models and data sets by their names on the hub: fetched, found again without it, and refused in words that help."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.runtime.paths import way_to_rows
from gspo_services.shared.settings import (
    load_settings,
    read_run_settings,
    require_model,
    run_fingerprint,
    told_settings,
    write_run_settings,
)
from gspo_services.shared.settings.hub import FETCHED, local_path
from tests.support.hub import COMMIT, TOKEN, Hub, hub

MODEL, ROWS = "hf://Qwen/Qwen3-0.6B", "hf://datasets/openai/gsm8k/main"


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub() as found:
        found.repositories = {
            "models/Qwen/Qwen3-0.6B": {
                "config.json": b"{}",
                "model.safetensors": b"weights",
                "pytorch_model.bin": b"pickle",
            },
            "models/meta/gated": {"config.json": b"{}"},
            "models/me/private": {"config.json": b"{}"},
            "datasets/openai/gsm8k": {"main/train.jsonl": b'{"a": 1}\n', "socratic/train.jsonl": b"{}\n"},
        }
        found.gated, found.private = {"models/meta/gated"}, {"models/me/private"}
        _use(found.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", FETCHED):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield found


def _use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does where it is set before the import."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template[template.index("/{repo_id}") :])


def test_a_model_comes_with_its_safetensors_and_a_data_set_with_its_folder(remote: Hub) -> None:
    model, rows = Path(local_path(f"{MODEL}@v1", fetch=True)), Path(local_path(ROWS, fetch=True))
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in rows.iterdir()] == ["train.jsonl"]
    assert rows.parts[-2:] == (COMMIT, "main")
    assert not (rows.parent / "socratic").exists()
    assert Path(local_path(f"{ROWS}/train.jsonl", fetch=True)).read_bytes() == b'{"a": 1}\n'


def test_a_run_is_told_by_the_name_and_finds_the_files_without_the_hub(
    remote: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[run]\ndirectory = "x"\n[environment.options]\ntrain_path = "{ROWS}"\n')
    words = [f"model.path={MODEL}"]
    settings = load_settings(config, words, fetch=True)
    assert (settings.model.path / "model.safetensors").is_file()
    assert Path(settings.environment.options["train_path"]).is_dir()
    settings.run.directory.mkdir()
    write_run_settings(settings)
    plain = json.loads((settings.run.directory / "settings.json").read_text())
    assert (plain["model"]["path"], plain["environment"]["options"]["train_path"]) == (MODEL, ROWS)
    monkeypatch.setenv(FETCHED, "1")
    remote.asked.clear()
    again = [load_settings(config, words, fetch=True), read_run_settings(settings.run.directory)]
    assert [each.model.path for each in again] == [settings.model.path] * 2
    assert {run_fingerprint(each) for each in again} == {run_fingerprint(settings)}
    assert remote.asked == []


def test_what_is_not_there_and_not_to_be_fetched_stays_a_name(remote: Hub) -> None:
    assert local_path(MODEL, fetch=False) == MODEL
    settings = load_settings(None, [f"model.path={MODEL}"])
    assert told_settings(settings)["model"]["path"] == MODEL
    with pytest.raises(ConfigurationError, match="`gspo run` and `gspo check` fetch it from the Hugging Face hub"):
        require_model(settings.model.path)
    assert "`gspo run` and `gspo check` fetch it" in way_to_rows(Path(ROWS))
    assert remote.asked == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf://Qwen/none", "the hub has no such model, or does not show it to you (HF_TOKEN is not set"),
        ("hf://datasets/openai/none", "the hub has no such data set"),
        (f"{MODEL}@v9", "it has no revision v9: https://huggingface.co/Qwen/Qwen3-0.6B lists them"),
        ("hf://meta/gated", "accept it at https://huggingface.co/meta/gated, and set HF_TOKEN"),
        ("hf://me/private", "the hub has no such model"),
        ("hf://gpt2", "expected hf://OWNER/MODEL"),
        ("hf://", "expected hf://OWNER/MODEL"),
        (f"{MODEL}/config.json", "expected hf://OWNER/MODEL"),
        ("hf://datasets/openai/gsm8k/../../x", "expected hf://OWNER/MODEL"),
        ("hf://datasets/openai/gsm8k/\n", "expected hf://OWNER/MODEL"),
    ],
)
def test_what_the_hub_refuses_is_said_with_the_way_out(name: str, words: str, remote: Hub) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(None, [f"model.path={name}"], fetch=True)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_token_opens_what_is_gated_and_a_wrong_one_does_not(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_a_wrong_one")
    with pytest.raises(ConfigurationError, match=r"does not show it to you \(with the token that is set"):
        local_path("hf://me/private", fetch=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("hf://me/private", "hf://meta/gated"):
        assert Path(local_path(name, fetch=True), "config.json").is_file()


def test_without_the_hub_what_is_whole_in_the_cache_is_used(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = local_path(MODEL, fetch=True)
    _use("http://127.0.0.1:1", monkeypatch)
    assert local_path(MODEL, fetch=True) == kept
    with pytest.raises(ConfigurationError) as refused:
        local_path(ROWS, fetch=True)
    assert "the hub cannot be reached: [Errno 111]" in str(refused.value)
    assert "`hf download openai/gsm8k --repo-type dataset --local-dir gsm8k`" in str(refused.value)


def test_without_its_package_the_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigurationError, match="pip install huggingface_hub"):
        local_path(MODEL, fetch=True)
