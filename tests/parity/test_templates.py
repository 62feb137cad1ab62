"""Every chat template of TRL's package: the text and ids of transformers, or its refusal; what goes on from an answer."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from gspo_services.rollout.rendering import create_renderer
from gspo_services.rollout.tokenizer import ChatTokenizer, TokenizerError
from tests.parity.chat_families import small_vocabulary, template

pytestmark = pytest.mark.parity


def names() -> list[str]:
    """The templates; none where TRL is not installed, and all tests of this file are left out."""
    found = importlib.util.find_spec("trl")
    assert found is None or found.origin is not None
    folder = Path(str(found.origin)).parent / "chat_templates" if found is not None else Path("nowhere")
    return sorted(path.stem for path in folder.glob("*.jinja"))


USER: Final = {"role": "user", "content": "How is the weather in Zürich?\n"}
SYSTEM: Final = {"role": "system", "content": "Answer\nbriefly. <b>"}
ANSWER: Final = {"role": "assistant", "content": "It is fine."}
WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a "city".',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "é <x>"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALLED: Final = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": 'Zürich "<b>"', "days": 3, "all": [True, None]}},
        }
    ],
}
RESULT: Final = {"role": "tool", "tool_call_id": "call00000", "name": "weather", "content": '{"sky": "blue"}\n'}
THOUGHT: Final = {**ANSWER, "reasoning_content": "Let me see.\n\nFine.", "thinking": "Let me see.\n\nFine."}
CALLED_IN_THOUGHT: Final = {**CALLED, "reasoning_content": "I must look.", "thinking": "I must look."}

CONVERSATIONS: Final[dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]]] = {
    "one turn": ([USER], [], {}),
    "turns": ([USER, ANSWER, USER, ANSWER, USER], [], {}),
    "speaks again": ([USER, ANSWER], [], {}),
    "system": ([SYSTEM, USER, ANSWER, USER], [], {}),
    "tools": ([SYSTEM, USER, CALLED, RESULT, ANSWER, USER, CALLED, RESULT], [WEATHER, WEATHER], {}),
    "thinking": ([USER, THOUGHT, USER, CALLED_IN_THOUGHT, RESULT], [WEATHER], {"enable_thinking": False}),
}


MARK: Final = r"<[|｜][^|｜<>\n]{1,40}[|｜]>|</?[a-z_]{1,20}>|<turn\|>|<\|turn>|\[/?[A-Z_]{3,20}\]"


@cache
def vocabulary() -> str:
    return str(small_vocabulary().to_str())


def make_model(directory: Path, text: str, stop: str = "</s>") -> ChatTokenizer:
    """A small vocabulary in which everything that looks like a mark is a token. ``stop`` ends an answer."""
    tokenizer = Tokenizer.from_str(vocabulary())
    marks = sorted(set(re.findall(MARK, text)) | {stop})
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in ("<s>", "</s>", *marks)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
    stop_id = tokenizer.token_to_id(stop)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 1500, "eos_token_id": stop_id}))
    return ChatTokenizer(directory)


IN_PARTS: Final = ("idefics3", "idefics3_training", "llava_next", "llava_next_training", "smolvlm", "smolvlm_training")
TEXT_ARGUMENTS: Final = ("deepseekv3",)
ALTERNATE: Final = frozenset({"tools", "thinking"})
"""Conversations with results of tools, where the template takes only users and assistants in turn."""
REFUSED: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys(("gemma", "gemma_training"), ALTERNATE | {"system"}),
    **dict.fromkeys(("cohere", "cohere_training", "gemma3", "gemma3_training"), ALTERNATE),
    **dict.fromkeys(("llava_next", "llava_next_training"), ALTERNATE),
    **dict.fromkeys(("cohere2", "cohere2_training"), frozenset({"tools"})),
}
"""Conversations that a template itself refuses, in transformers and here."""
ENDS: Final = {
    **dict.fromkeys(("cohere2", "cohere2_training"), "<|END_OF_TURN_TOKEN|>"),
    **dict.fromkeys(("gptoss", "gptoss_training"), "<|return|>"),
}
"""Tokens at which models stop that are not the first mark after an answer."""
DO_NOT_GO_ON: Final = {"gptoss": "ends an earlier answer with other tokens", "gptoss_training": "ends an earlier answer"}
"""Templates without exact second turns, and the reason."""

EMPTY: Final = r"<think>\s*</think>\s*"
OPENINGS: Final[dict[str, tuple[bool, ...]]] = {
    **dict.fromkeys(("glm4moe", "glm4moe_training", "qwen3", "qwen3_training"), (False, True)),
    **dict.fromkeys(("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2", "lfm2_v2_training"), (True, True)),
    **dict.fromkeys(("llama3_1", "llama3_2", "qwen2_5", "qwen2_5_training"), (True, True)),
    **dict.fromkeys(("qwen3_instruct_2507", "qwen3_instruct_2507_training", "qwen3_vl", "qwen3_vl_training"), (True, True)),
}
"""Templates in which a demanded call can be opened: as they are, and without reasoning."""


def as_it_takes(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for transformers, in the form in which a template takes them, which is written down by hand."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        if name in IN_PARTS:
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", []):
            if name in TEXT_ARGUMENTS:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return messages


def as_a_client_sends(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages: no content is null, arguments are text, and text is in parts."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        elif message["role"] == "user":
            message["content"] = [{"type": "text", "text": message["content"]}]
    return messages


def test_the_package_has_the_templates_that_are_compared() -> None:
    assert len(names()) == 72


@pytest.mark.parametrize("name", names())
def test_a_template_writes_what_transformers_writes(name: str, tmp_path: Path) -> None:
    ours = make_model(tmp_path / "model", template(name))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    renderer = create_renderer(ours, "template")
    refused = set()
    for conversation, (messages, tools, arguments) in CONVERSATIONS.items():
        for opens in (True, False):
            try:
                plain = as_it_takes(name, messages)
                text = theirs.apply_chat_template(
                    plain, tools=tools or None, tokenize=False, add_generation_prompt=opens, **arguments
                )
            except Exception as error:  # noqa: BLE001
                refused.add(conversation)
                with pytest.raises(TokenizerError, match=re.escape(str(error))):
                    ours.render(messages, tools=tools, arguments=arguments, add_generation_prompt=opens)
                continue
            assert ours.render(messages, tools=tools, arguments=arguments, add_generation_prompt=opens) == text, conversation
            if opens:
                ids = theirs(text, add_special_tokens=False)["input_ids"]
                assert renderer.prompt_ids(messages, tools, arguments) == ids, conversation
                assert renderer.prompt_ids(as_a_client_sends(messages), tools, arguments) == ids, conversation
                if not tools:
                    environment = ChatTokenizer(tmp_path / "model", arguments)
                    assert environment.prompt_ids(messages) == ids, conversation
    assert refused == REFUSED.get(name, set())


@pytest.mark.parametrize("name", names())
def test_a_conversation_goes_on_from_an_answer_or_the_reason_is_said(name: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model", template(name))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    whole = theirs.apply_chat_template(
        as_it_takes(name, [USER, ANSWER, USER]), tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    _, after = whole.split(ANSWER["content"])
    first = re.match(rf"\s*({MARK})", after)
    assert first is not None
    stop = ENDS.get(name, first.group(1))
    ours = make_model(tmp_path / "stops", template(name), stop)
    ours = ChatTokenizer(ours.directory, {"enable_thinking": False})
    renderer = create_renderer(ours, "template")
    prompt = ours.prompt_ids([USER])
    if name in DO_NOT_GO_ON:
        with pytest.raises(TokenizerError, match=DO_NOT_GO_ON[name]):
            ours.observation_ids([USER])
        assert renderer.bridge(prompt, ours.encode(f"{ANSWER['content']}{stop}"), [USER]) is None
        return
    closing, _, rest = after.partition(stop)
    expected = ours.encode(rest)
    # Where the prompt has opened the reasoning, the answer ends it: else the template would have no text for it.
    said = ("Hm.\n</think>\n\n" if ours.decode(prompt).endswith("<think>\n") else "") + ANSWER["content"]
    assert ours.observation_ids([USER]) == expected
    assert renderer.bridge(prompt, ours.encode(f"{said}{closing}{stop}"), [USER]) == expected
    assert renderer.bridge(prompt, ours.encode(said), [USER]) == ours.encode(f"{closing}{stop}{rest}")


@pytest.mark.parametrize("name", names())
def test_what_opens_a_demanded_call_is_how_the_template_writes_one(name: str, tmp_path: Path) -> None:
    ours = make_model(tmp_path / "model", template(name))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    renderer = create_renderer(ours, "template")
    opens = []
    for arguments in ({}, {"enable_thinking": False}):
        options = {"tools": [WEATHER], "tokenize": False, **arguments}
        openings = [renderer.call_opening(called, [WEATHER], arguments) for called in ("weather", "")]
        opens.append(None not in openings)
        if openings == [None, None]:
            continue
        whole = theirs.apply_chat_template(as_it_takes(name, [USER, CALLED]), **options)
        prompt = theirs.apply_chat_template(as_it_takes(name, [USER]), add_generation_prompt=True, **options)
        # A template need not write in an answer the reasoning that its prompt has closed at once.
        begun = re.escape(re.sub(EMPTY, "", prompt)) + f"({EMPTY})?"
        for opening, rest in zip(openings, ('"?', "weather"), strict=True):
            assert re.match(begun + re.escape(ours.decode(opening or [])) + rest, whole), (whole, opening)
    assert tuple(opens) == OPENINGS.get(name, (False, False))
