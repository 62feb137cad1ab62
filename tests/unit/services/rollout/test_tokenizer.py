"""Chat messages to token ids: the same as transformers', turn by turn, and what cannot be used is named."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from gspo_services.rollout.tokenizer import MOST_PROMPTS, ChatTokenizer, TokenizerError
from tests.support.engines.chat_models import (
    ALTERNATING_TEMPLATE,
    QWEN_TEMPLATE,
    TINY_TEMPLATE,
    chat_tokenizer,
    save_chat_model,
)

Messages = Sequence[dict[str, str]]


class Model:
    """A model directory read by transformers and by us."""

    def __init__(self, directory: Path, tokenizer: PreTrainedTokenizerFast, **config: Any) -> None:
        save_chat_model(directory, tokenizer, **config)
        self.theirs = PreTrainedTokenizerFast.from_pretrained(directory)
        self.ours = ChatTokenizer(directory)

    def rendered(self, messages: Messages) -> list[int]:
        ids = self.theirs.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)
        assert isinstance(ids, list)
        return ids

    def action(self, text: str) -> list[int]:
        """The tokens that an engine samples to say ``text`` and end its turn."""
        return [*self.theirs.encode(text, add_special_tokens=False), self.theirs.eos_token_id]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    def directory(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    qwen = chat_tokenizer(QWEN_TEMPLATE, "<|im_end|>")
    base = chat_tokenizer(QWEN_TEMPLATE, "<|endoftext|>")
    im_end = base.convert_tokens_to_ids("<|im_end|>")
    return {
        "tiny": Model(directory("tiny"), chat_tokenizer(TINY_TEMPLATE, "<|end|>")),
        "qwen": Model(directory("qwen"), qwen),
        "greedy end": Model(directory("phi"), chat_tokenizer(ALTERNATING_TEMPLATE, "<|end|>", eos_takes_whitespace=True)),
        "other stop": Model(directory("base"), base, eos_token_id=[im_end]),
    }


ALL = ["tiny", "qwen", "greedy end", "other stop"]
SAYS_TOOLS = ["tiny", "qwen", "other stop"]
QUESTION = {"role": "user", "content": "What is 12 + 30?"}
SYSTEM = {"role": "system", "content": "Use the calculator."}
ANSWER = "<calc>12+30</calc>\n"


@pytest.mark.parametrize("name", ALL)
def test_a_prompt_has_the_ids_that_transformers_gives_it(name: str, models: dict[str, Model]) -> None:
    model = models[name]
    assert model.ours.prompt_ids([QUESTION]) == model.rendered([QUESTION])
    if name != "greedy end":
        assert model.ours.prompt_ids([SYSTEM, QUESTION]) == model.rendered([SYSTEM, QUESTION])


@given(content=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=50, deadline=None)
def test_any_text_has_the_ids_that_transformers_gives_it(content: str, models: dict[str, Model]) -> None:
    messages = [{"role": "user", "content": content}]
    for name in ALL:
        assert models[name].ours.prompt_ids(messages) == models[name].rendered(messages), name


@pytest.mark.parametrize("name", ["tiny", "qwen", "greedy end"])
def test_prompt_action_and_observation_are_the_whole_conversation(name: str, models: dict[str, Model]) -> None:
    model = models[name]
    observation = {"role": "user" if name == "greedy end" else "tool", "content": "42"}
    answer = ANSWER.strip()
    pieces = [model.ours.prompt_ids([QUESTION]), model.action(answer), model.ours.observation_ids([observation])]
    whole = model.rendered([QUESTION, {"role": "assistant", "content": answer}, observation])
    assert list(chain(*pieces)) == whole
    # And once more, to show that the second observation needs nothing of the first.
    again = [model.action("It is 42."), model.ours.observation_ids([QUESTION])]
    second = {"role": "assistant", "content": "It is 42."}
    assert list(chain(*pieces, *again)) == model.rendered(
        [QUESTION, {"role": "assistant", "content": answer}, observation, second, QUESTION]
    )


def test_a_group_s_prompt_is_rendered_and_encoded_once(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ChatTokenizer(models["tiny"].ours.directory)
    rendered: list[str] = []
    render = tokenizer.render

    def counted(messages: Messages) -> str:
        rendered.append(render(messages))
        return rendered[-1]

    monkeypatch.setattr(tokenizer, "render", counted)
    first = tokenizer.prompt_ids([{"role": "user", "content": "7+9="}])
    expected = list(first)
    first.append(-1)
    assert tokenizer.prompt_ids([{"role": "user", "content": "7+9="}]) == expected, "nobody else's list"
    assert len(rendered) == 1
    assert tokenizer.prompt_ids([{"role": "user", "content": "7+8="}]) != expected
    for number in range(MOST_PROMPTS):
        tokenizer.prompt_ids([{"role": "user", "content": f"{number}+1="}])
    assert len(tokenizer._remembered) <= MOST_PROMPTS
    with pytest.raises(TokenizerError):
        tokenizer.prompt_ids([{"role": "user", "content": object()}])
    with pytest.raises(TokenizerError):
        tokenizer.prompt_ids([{"role": "user", "content": object()}])


@pytest.mark.parametrize("name", SAYS_TOOLS)
def test_several_messages_are_one_observation(name: str, models: dict[str, Model]) -> None:
    model = models[name]
    tools = [{"role": "tool", "content": "42"}, {"role": "tool", "content": "43"}]
    rendered = model.rendered([QUESTION, {"role": "assistant", "content": ANSWER}, *tools])
    ids = model.ours.observation_ids(tools)
    assert rendered[-len(ids) :] == ids


def test_a_stop_token_other_than_the_tokenizers_eos_is_not_repeated(models: dict[str, Model]) -> None:
    model = models["other stop"]
    im_end = model.theirs.convert_tokens_to_ids("<|im_end|>")
    assert model.ours.stop_ids == {im_end, model.theirs.eos_token_id}
    action = [*model.theirs.encode(ANSWER, add_special_tokens=False), im_end]
    tool = {"role": "tool", "content": "42"}
    whole = model.rendered([QUESTION, {"role": "assistant", "content": ANSWER}, tool])
    assert model.ours.prompt_ids([QUESTION]) + action + model.ours.observation_ids([tool]) == whole


def test_action_text_has_no_special_tokens_unless_they_are_asked_for(models: dict[str, Model]) -> None:
    for model in models.values():
        ids = model.theirs.encode(f"a<|tool|>{ANSWER}", add_special_tokens=False)
        assert model.ours.action_text(ids) == f"a{ANSWER}"
        shown = ChatTokenizer(model.ours.directory, show_special_tokens=True)
        assert shown.action_text(ids) == f"a<|tool|>{ANSWER}"


def test_ids_that_the_tokenizer_does_not_have_are_counted_and_have_no_text(models: dict[str, Model]) -> None:
    tokenizer = models["tiny"].ours
    known = tokenizer.encode("abc")
    largest = max(tokenizer.encode("<|endoftext|>"))
    ids = [*known, largest, largest + 1, tokenizer.vocab_size - 1, tokenizer.vocab_size, 2**31 - 1, -1]
    assert tokenizer.num_unknown(np.array(ids, dtype=np.int32)) == 5
    assert tokenizer.action_text(ids) == "abc"
    assert tokenizer.num_unknown(np.array([], dtype=np.int32)) == 0


def test_a_tokenizer_that_asks_for_truncation_and_padding_does_neither(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(TINY_TEMPLATE, "<|end|>")
    whole = Model(tmp_path / "whole", tokenizer).ours.prompt_ids([QUESTION])
    plain = json.loads((tmp_path / "whole" / "tokenizer.json").read_text())
    plain["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    plain["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }  # fmt: skip
    (tmp_path / "whole" / "tokenizer.json").write_text(json.dumps(plain))
    assert ChatTokenizer(tmp_path / "whole").prompt_ids([QUESTION]) == whole


def test_stop_ids_of_the_generation_configuration_are_kept_beside_eos(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(QWEN_TEMPLATE, "<|im_end|>")
    save_chat_model(tmp_path, tokenizer)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert ChatTokenizer(tmp_path).stop_ids == {3, 4, tokenizer.eos_token_id}


def test_a_stop_token_of_either_configuration_counts_as_it_does_for_the_engine(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(QWEN_TEMPLATE, "<|im_end|>")
    save_chat_model(tmp_path, tokenizer, eos_token_id=[5])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert ChatTokenizer(tmp_path).stop_ids == {3, 5, tokenizer.eos_token_id}


def refusal(directory: Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        ChatTokenizer(directory)
    return str(caught.value)


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    return save_chat_model(tmp_path / "model", chat_tokenizer(TINY_TEMPLATE, "<|end|>"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_missing_file_is_named_with_the_way_out(name: str, model_directory: Path) -> None:
    (model_directory / name).unlink()
    message = refusal(model_directory)
    assert str(model_directory / name) in message
    assert "no such file" in message
    assert "gspo model tiny" in message or "save_pretrained" in message


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]"])
def test_a_broken_file_is_named(name: str, content: bytes, model_directory: Path) -> None:
    (model_directory / name).write_bytes(content)
    assert str(model_directory / name) in refusal(model_directory)


def test_a_tokenizer_of_another_model_is_refused_with_both_sizes(model_directory: Path) -> None:
    (model_directory / "config.json").write_text('{"vocab_size": 300, "eos_token_id": 1}')
    message = refusal(model_directory)
    assert str(model_directory) in message
    assert "the model's vocabulary has 300 tokens" in message


def test_a_template_with_a_syntax_error_is_refused_with_its_line(model_directory: Path) -> None:
    (model_directory / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message. }}\n{% endfor %}")
    message = refusal(model_directory)
    assert str(model_directory) in message
    assert "line 2" in message


def test_a_model_without_a_template_is_refused(model_directory: Path) -> None:
    (model_directory / "chat_template.jinja").unlink()
    assert "no chat_template.jinja" in refusal(model_directory)


def test_a_model_without_an_end_of_turn_is_refused(model_directory: Path) -> None:
    config = json.loads((model_directory / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (model_directory / "tokenizer_config.json").write_text(json.dumps(config))
    (model_directory / "config.json").write_text('{"vocab_size": 512}')
    assert "no eos_token and no eos_token_id" in refusal(model_directory)


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_refuses_or_breaks_is_an_error_with_the_path(
    template: str, part: str, model_directory: Path
) -> None:
    (model_directory / "chat_template.jinja").write_text(template)
    tokenizer = ChatTokenizer(model_directory)
    with pytest.raises(TokenizerError, match=part) as caught:
        tokenizer.prompt_ids([QUESTION])
    assert str(model_directory) in str(caught.value)


def test_a_template_that_leaves_out_the_answer_cannot_go_on(model_directory: Path) -> None:
    (model_directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(TokenizerError, match="drops the assistant's content"):
        ChatTokenizer(model_directory).observation_ids([QUESTION])
