"""The tiny model for agents: what it learns is what a rollout renders, and its calls are found again."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_services.prepare.tiny_models.lessons import IGNORED_LABEL, Lesson, encode_conversations
from gspo_services.prepare.tiny_models.schools import ToolSchool, renderer_of
from gspo_services.prepare.tiny_models.tiny import RECORD_FILE, make_tiny_model
from gspo_services.prepare.tiny_models.tokenizer import CALL_PIECES, UNUSED_IDS, VOCAB_SIZE, build_tokenizer
from gspo_services.rollout.rendering import create_renderer
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.tasks.environments import TOOLS, Shop, ShopOptions
from gspo_services.tasks.environments.shop import solved

TOKENIZER = build_tokenizer(tools=True)
RENDERER = renderer_of(TOKENIZER)
SHOP = Shop(ShopOptions(num_eval_tasks=6))
TASK: Any = {"question": "fig*7", "prices": {"fig": 38}, "answer": "266"}
TEXT = (
    "<|system|>look,multiply,add<|end|><|user|>fig*7<|end|>"
    '<|assistant|><tool_call>{"name": "look", "arguments": {"item": "fig"}}</tool_call><|end|><|tool|>38<|end|>'
    '<|assistant|><tool_call>{"name": "multiply", "arguments": {"a": 38, "b": 7}}</tool_call><|end|><|tool|>266<|end|>'
    "<|assistant|>266<|end|>"
)


def lesson_of(conversation: list[dict[str, Any]]) -> Lesson:
    (lesson,) = encode_conversations(TOKENIZER, [conversation], TOOLS)
    return lesson


@settings(deadline=None)
@given(st.text(max_size=30) | st.lists(st.sampled_from([*CALL_PIECES, "a", '"', "{", "}", " "])).map("".join))
def test_any_text_decodes_unchanged(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text


def test_the_fixed_parts_of_a_call_are_single_tokens_behind_those_of_the_other_model() -> None:
    other = build_tokenizer()
    assert len(other) + UNUSED_IDS == VOCAB_SIZE
    assert TOKENIZER.convert_ids_to_tokens(range(len(other))) == other.convert_ids_to_tokens(range(len(other)))
    ids = [TOKENIZER.encode(piece, add_special_tokens=False) for piece in CALL_PIECES]
    assert ids == [[len(other) + index] for index in range(len(CALL_PIECES))]
    assert (len(lesson_of(solved(TASK)).ids), len(TEXT)) == (83, 296)


def test_a_conversation_with_tools_is_written_with_their_names_and_calls_as_qwen_has_them() -> None:
    lesson = lesson_of(solved(TASK))
    assert TOKENIZER.decode(lesson.ids) == TEXT
    trained = TOKENIZER.decode([label for label in lesson.labels if label != IGNORED_LABEL])
    turns = [turn.split("<|end|>")[0] + "<|end|>" for turn in TEXT.split("<|assistant|>")[1:]]
    assert trained == "".join(turns)
    assert all(label in (token, IGNORED_LABEL) for token, label in zip(lesson.ids, lesson.labels, strict=True))


@pytest.mark.parametrize("careful", [True, False])
def test_the_demonstrations_are_the_ids_that_a_rollout_has_turn_by_turn(careful: bool) -> None:
    rng = random.Random(1)
    num_turns = 0
    for _ in range(40):
        conversation = SHOP.demonstration(rng, careful=careful)
        lesson = lesson_of(conversation)
        ids = RENDERER.prompt_ids(conversation[:1], TOOLS)
        for place in range(1, len(conversation), 2):
            assert ids == RENDERER.prompt_ids(conversation[:place], TOOLS)
            end = lesson.ids.index(TOKENIZER.eos_token_id, len(ids)) + 1
            turn = lesson.ids[len(ids) : end]
            assert lesson.labels[len(ids) : end] == turn
            said = RENDERER.parse(turn, TOOLS)
            assert said.problem is None
            assert said.content == conversation[place]["content"]
            assert [(call.name, json.loads(call.arguments_json)) for call in said.tool_calls] == [
                (call["function"]["name"], call["function"]["arguments"])
                for call in conversation[place].get("tool_calls", [])
            ]
            bridge = RENDERER.bridge(ids, turn, conversation[place + 1 : place + 2], TOOLS)
            ids = [*ids, *turn, *(bridge or [])]
            num_turns += 1
        assert ids == lesson.ids
    assert num_turns == 120 if careful else num_turns < 120


class Teacher:
    """Speaks as the careful teacher does, or says the same in every turn."""

    def __init__(self, says: str | None = None) -> None:
        self.config = SimpleNamespace(pad_token_id=TOKENIZER.pad_token_id, eos_token_id=TOKENIZER.eos_token_id)
        self._says = None if says is None else TOKENIZER.encode(says + "<|end|>", add_special_tokens=False)
        self._known = [lesson_of(solved(SHOP.tasks("eval").task(index))).ids for index in range(6)]

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        turns = [self._turn(ids[mask > 0].tolist()) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        longest = max(len(turn) for turn in turns)
        padded = [turn + [self.config.pad_token_id] * (longest - len(turn)) for turn in turns]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    def _turn(self, context: list[int]) -> list[int]:
        if self._says is not None:
            return self._says
        (ids,) = (known for known in self._known if known[: len(context)] == context)
        return ids[len(context) : ids.index(self.config.eos_token_id, len(context)) + 1]


@pytest.mark.parametrize(
    ("says", "reward"),
    [
        (None, 1.0),
        ("?", 0.0),
        ('<tool_call>{"name": "look", "arguments": {"item": "fig"}}</tool_call>', 0.0),
        ("<tool_call>look</tool_call>", 0.0),
    ],
)
def test_the_reward_is_that_of_episodes_with_tools(says: str | None, reward: float) -> None:
    model: Any = Teacher(says)
    assert ToolSchool(TOKENIZER, SHOP).reward(model, 12, greedy=True) == reward


def test_the_model_is_made_with_its_own_template_and_vocabulary(tmp_path: Path) -> None:
    made = make_tiny_model(tmp_path / "m", tools=True, num_steps=2, num_eval_episodes=3, progress=lambda _: None)
    assert set(made.sampled_rewards) == {"shop"}
    assert json.loads((tmp_path / "m" / RECORD_FILE).read_text())["greedy_rewards"].keys() == {"shop"}
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["vocab_size"] == len(TOKENIZER) + UNUSED_IDS
    renderer = create_renderer(ChatTokenizer(tmp_path / "m"))
    assert renderer.name == "template"
    conversation = solved(TASK)
    assert renderer.prompt_ids(conversation[:1], TOOLS) == RENDERER.prompt_ids(conversation[:1], TOOLS)
