"""The tiny model: tokenizer and template, files, determinism, and what it refuses to overwrite."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from gspo.tasks.environments import DemonstrationMessage
from gspo_services.prepare.tiny_models.imitation import TinyProgress
from gspo_services.prepare.tiny_models.lessons import IGNORED_LABEL, encode
from gspo_services.prepare.tiny_models.tiny import RECORD_FILE, TinyReport, make_tiny_model
from gspo_services.prepare.tiny_models.tokenizer import VOCAB_SIZE, build_tokenizer

TOKENIZER = build_tokenizer()


def make(directory: Path, seed: int) -> tuple[TinyReport, list[TinyProgress]]:
    reports: list[TinyProgress] = []
    made = make_tiny_model(directory, seed=seed, num_steps=3, num_eval_episodes=4, progress=reports.append)
    return made, reports


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyReport:
    return make(tmp_path_factory.mktemp("tiny") / "model", seed=5)[0]


def digest(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


@settings(deadline=None)
@given(st.text(max_size=30).filter(lambda text: "<|" not in text))
def test_any_text_is_one_token_per_byte_and_decodes_unchanged(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_a_conversation_is_only_markers_and_content() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "34*57"},
        {"role": "assistant", "content": "[34*57]"},
        {"role": "tool", "content": "1938"},
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|system|>s<|end|><|user|>34*57<|end|><|assistant|>[34*57]<|end|><|tool|>1938<|end|><|assistant|>")
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert len(ids) == len("s34*57[34*57]1938") + 9
    assert max(ids) < VOCAB_SIZE - 1


def test_only_the_assistants_words_and_their_end_are_trained() -> None:
    demonstration = [DemonstrationMessage("user", "1+1=", False), DemonstrationMessage("assistant", "2", True)]
    (lesson,) = encode(TOKENIZER, [demonstration])
    assert TOKENIZER.decode(lesson.ids) == "<|user|>1+1=<|end|><|assistant|>2<|end|>"
    trained = [label for label in lesson.labels if label != IGNORED_LABEL]
    assert TOKENIZER.decode(trained) == "2<|end|>"
    assert lesson.labels[-2:] == lesson.ids[-2:]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(made: TinyReport, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    make(tmp_path / "same", seed=5)
    make(tmp_path / "other", seed=6)
    assert digest(tmp_path / "same") == digest(made.directory) != digest(tmp_path / "other")
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_checkpoint_is_float32_with_the_names_that_engines_read(made: TinyReport) -> None:
    weights = load_file(made.directory / "model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}
    assert "model.layers.1.mlp.experts.7.gate_proj.weight" in weights
    config = json.loads((made.directory / "config.json").read_text())
    assert (config["dtype"], config["vocab_size"], config["tie_word_embeddings"]) == ("float32", VOCAB_SIZE, False)
    tokenizer = AutoTokenizer.from_pretrained(made.directory)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.eos_token == "<|end|>"
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert tokenizer.chat_template == TOKENIZER.chat_template
    model = Qwen3MoeForCausalLM.from_pretrained(made.directory)
    assert sum(parameter.numel() for parameter in model.parameters()) == made.num_parameters


def test_progress_ends_with_the_last_step_and_rewards_are_reported_by_environment(tmp_path: Path) -> None:
    report, progress = make(tmp_path / "model", seed=1)
    assert (progress[-1].step, progress[-1].num_steps) == (3, 3)
    assert set(report.sampled_rewards) == {"arithmetic", "calculator"}
    assert json.loads((report.directory / RECORD_FILE).read_text())["seed"] == 1


def test_an_earlier_tiny_model_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    make(directory, seed=1)
    before = digest(directory)
    make(directory, seed=2)
    assert digest(directory) != before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_with_other_files_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=f"{tmp_path} is not empty and not a tiny model"):
        make(tmp_path, seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_environment_without_demonstrations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='"dataset" has no demonstrations'):
        make_tiny_model(tmp_path / "model", environments=["dataset"], progress=lambda progress: None)
