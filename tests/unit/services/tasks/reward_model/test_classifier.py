"""A reward model's scores are those that transformers gives for each conversation alone, whatever shares its batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_services.tasks.reward_model.classifier import load_classifier
from gspo_services.tasks.reward_model.conversations import Encoded, UnreadableConversationError
from gspo_services.tasks.reward_model.options import RewardModelOptions
from gspo_services.tasks.reward_model.server import batches_of
from tests.support.engines.chat_models import TINY_TEMPLATE
from tests.support.rewards.classifiers import official_score, save_classifier

QUESTION = "What is 12 + 30?"
ANSWERS = ("42", "The answer is 42.", "Use the calculator: " * 7, "")

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def conversation(answer: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": answer},
    ]


def rendered(answer: str) -> str:
    return f"<|system|>Be brief.<|end|><|user|>{QUESTION}<|end|><|assistant|>{answer}<|end|>"


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("llama", {"pad_token_id": None}),
        # The template ends with this token: transformers then reads the score from the one before.
        ("llama", {"pad_token_id": "<|end|>"}),
        ("bert", {}),
        ("gpt2", {}),
    ],
    ids=["llama", "qwen3", "no-pad", "pad-is-eos", "bert", "gpt2"],
)
def test_each_conversation_of_a_batch_has_the_score_that_it_has_alone(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    if isinstance(changes.get("pad_token_id"), str):
        from tests.support.engines.chat_models import chat_tokenizer

        changes = {"pad_token_id": chat_tokenizer(TINY_TEMPLATE, "<|end|>").convert_tokens_to_ids(changes["pad_token_id"])}
    save_classifier(tmp_path, kind, **changes)
    classifier = load_classifier(RewardModelOptions(path=str(tmp_path)))
    encoded = [classifier.encode(conversation(answer)) for answer in ANSWERS]
    assert len({len(each.ids) for each in encoded}) > 1, "there is padding"
    scores = classifier.scores(encoded)
    assert scores == pytest.approx([official_score(tmp_path, rendered(answer)) for answer in ANSWERS], abs=1e-4)
    assert max(scores) - min(scores) > 0.005, "the answers are told apart"


@pytest.mark.parametrize(
    ("mode", "texts", "has_types"),
    [
        ("text", (f"Be brief.\n{QUESTION}42",), False),
        ("pair", (f"Be brief.\n{QUESTION}", "42"), False),
        ("pair", (f"Be brief.\n{QUESTION}", "42"), True),
    ],
)
def test_an_encoder_reads_texts_or_a_pair_as_its_tokenizer_makes_them(
    tmp_path: Path, mode: Any, texts: tuple[str, ...], has_types: bool
) -> None:
    save_classifier(tmp_path, "bert", template=None, has_types=has_types)
    classifier = load_classifier(RewardModelOptions(path=str(tmp_path), input=mode))
    (score,) = classifier.scores([classifier.encode(conversation("42"))])
    assert score == pytest.approx(official_score(tmp_path, *texts, special=True), abs=1e-4)


def test_a_model_without_types_gets_none_from_a_tokenizer_that_has_them(tmp_path: Path) -> None:
    save_classifier(tmp_path, has_types=True)
    classifier = load_classifier(RewardModelOptions(path=str(tmp_path)))
    given: list[str] = []
    classifier._model.register_forward_pre_hook(lambda _, _args, inputs: given.extend(inputs), with_kwargs=True)
    classifier.scores([classifier.encode(conversation("42"))])
    assert given == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_conversation_that_is_too_long_fails_or_is_cut_and_says_so(tmp_path: Path, side: str) -> None:
    """Its end is cut, whatever its tokenizer says."""
    save_classifier(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation_side": side}))
    strict = load_classifier(RewardModelOptions(path=str(tmp_path), max_tokens=30))
    assert not strict.encode(conversation("42")).is_cut
    with pytest.raises(
        UnreadableConversationError, match=r"has \d+ tokens, and the reward model reads 30: lower"
    ) as refusal:
        strict.encode(conversation("x" * 200))
    assert refusal.value.reason == "too_large"
    cutting = load_classifier(RewardModelOptions(path=str(tmp_path), max_tokens=30, too_long="truncate"))
    cut = cutting.encode(conversation("x" * 200))
    assert (len(cut.ids), cut.is_cut) == (30, True)
    assert cut.ids == load_classifier(RewardModelOptions(path=str(tmp_path))).encode(conversation("x" * 200)).ids[:30]
    with pytest.raises(ValueError, match=r"reward.model_max_tokens is 300, and the model takes 256"):
        load_classifier(RewardModelOptions(path=str(tmp_path), max_tokens=300))


def test_what_the_template_or_the_tokenizer_refuses_is_a_failure_of_that_conversation(tmp_path: Path) -> None:
    save_classifier(
        tmp_path,
        template=NO_SYSTEM,
    )
    classifier = load_classifier(RewardModelOptions(path=str(tmp_path)))
    with pytest.raises(UnreadableConversationError, match="no system"):
        classifier.encode(conversation("42"))
    with pytest.raises(UnreadableConversationError, match="has no tokens"):
        classifier.encode([{"role": "user", "content": ""}])


@pytest.mark.parametrize(
    ("saved", "options", "text"),
    [
        ({"num_labels": 2}, {}, "LlamaForSequenceClassification has 2 outputs"),
        (
            {"head": "ForCausalLM"},
            {},
            r"architectures is \['LlamaForCausalLM'\], and a reward model's ends in",
        ),
        ({"template": None}, {}, 'has no chat template: set reward.model_input = "text" or "pair"'),
        ({}, {"device": "cuda:0"}, "reward.model_device is cuda:0, and there is no such GPU"),
    ],
)
def test_a_model_that_cannot_score_is_refused_with_the_way_out(
    tmp_path: Path, saved: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    save_classifier(tmp_path, **saved)
    with pytest.raises(ValueError, match=text):
        load_classifier(RewardModelOptions(path=str(tmp_path), **options))


def test_weights_of_another_architecture_are_not_replaced_by_random_ones(tmp_path: Path) -> None:
    save_classifier(tmp_path / "causal", head="ForCausalLM")
    save_classifier(tmp_path / "classifier")
    (tmp_path / "classifier" / "model.safetensors").write_bytes((tmp_path / "causal" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"its files lack score.weight"):
        load_classifier(RewardModelOptions(path=str(tmp_path / "classifier")))


def test_weights_that_the_architecture_has_no_place_for_are_refused_except_a_former_head(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    load_classifier(RewardModelOptions(path=str(tmp_path)))
    save_file({**weights, "model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"hold model.layers.2.mlp.up_proj.weight, for which config.json's architecture"):
        load_classifier(RewardModelOptions(path=str(tmp_path)))


def test_a_model_whose_numbers_are_none_is_refused_before_it_scores(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: torch.full_like(each, float("nan")) for name, each in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="it gives nan for a conversation of two words: its weights are damaged"):
        load_classifier(RewardModelOptions(path=str(tmp_path)))


def test_batches_are_neighbours_in_length_within_the_limit_of_tokens() -> None:
    def length(each: Encoded) -> int:
        return len(each.ids)

    waiting = [Encoded([0] * number, [], False) for number in (5, 100, 1, 6, 2, 40)]
    batches = [[length(each) for each in batch] for batch in batches_of(waiting, length, 12)]
    assert batches == [[1, 2], [5, 6], [40], [100]]
