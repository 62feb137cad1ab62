"""The renderer by a model's own template: ids, bridges, answers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gspo_services.rollout.rendering import RenderingError, create_renderer
from gspo_services.rollout.rendering.template import TemplateRenderer
from gspo_services.rollout.tokenizer import ChatTokenizer
from tests.support.engines import conversations
from tests.support.engines.conversations import assistant, beginning, conversation, results
from tests.unit.services.rollout.rendering.models import BARE, ROLES_STOP, TAGS, make

USER = {"role": "user", "content": "How is the weather?"}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "blue"}
SEEDS = range(40)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TemplateRenderer]:
    def directory(name: str) -> Path:
        return tmp_path_factory.mktemp(name) / "model"

    models = {
        "tags": make(directory("tags"), TAGS),
        "bare": make(directory("bare"), BARE, "<|end|>"),
    }
    return {name: TemplateRenderer(model) for name, model in models.items()}


def ids(renderer: TemplateRenderer, text: str) -> list[int]:
    return renderer._tokenizer.encode(text)


@pytest.mark.parametrize("name", ["tags", "bare"])
def test_prompts_have_the_ids_that_transformers_gives_them(name: str, renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers[name]
    theirs = PreTrainedTokenizerFast.from_pretrained(renderer._tokenizer.directory)
    for seed in SEEDS:
        rng = random.Random(seed)
        messages = conversation(rng, turns=2, max_calls=1, reasoning=True)
        tools = conversations.tools(rng) if seed % 2 else []
        plain = json.loads(json.dumps(messages))
        for message in plain:
            message["content"] = message["content"] or ""
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        expected = theirs.apply_chat_template(
            plain, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False, enable_thinking=False
        )
        assert renderer.prompt_ids(messages, tools, {"enable_thinking": False}) == expected, seed


@pytest.mark.parametrize("name", ["tags", "bare"])
def test_prompt_answer_and_bridge_are_the_whole_conversation(name: str, renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers[name]
    for seed in SEEDS:
        rng = random.Random(seed)
        messages = beginning(rng)
        tools = conversations.tools(rng) if seed % 3 else []
        whole = renderer.prompt_ids(messages, tools)
        for _ in range(3):
            answer = assistant(rng, calls=rng.randint(0, 1), reasoning=name == "tags" and rng.random() < 0.5)
            new = results(rng, answer)
            expected = renderer.prompt_ids([*messages, answer, *new], tools)
            assert expected[: len(whole)] == whole
            rest = expected[len(whole) :]
            end = next(index for index, token in enumerate(rest) if token in renderer.stop_ids) + 1
            bridge = renderer.bridge(whole, rest[:end], new, tools)
            assert bridge == rest[end:], seed
            whole, messages = expected, [*messages, answer, *new]


def test_an_answer_without_its_stop_token_is_closed(renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers["tags"]
    prompt = renderer.prompt_ids([USER])
    closed = renderer.bridge(prompt, [*ids(renderer, "It is"), *ids(renderer, "<|im_end|>")], [USER])
    assert closed is not None
    assert renderer.bridge(prompt, ids(renderer, "It is"), [USER]) == [*ids(renderer, "<|im_end|>"), *closed]
    assert renderer.bridge(prompt, [], [USER]) == [*ids(renderer, "<|im_end|>"), *closed]
    assert renderer._tokenizer.decode(closed) == "\n<|im_start|>user\nHow is the weather?<|im_end|>\n<|im_start|>assistant\n"


def test_a_bridge_follows_the_template_arguments(renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers["tags"]
    bridge = renderer.bridge(
        renderer.prompt_ids([USER]), ids(renderer, "Hm.<|im_end|>"), [USER], [], {"enable_thinking": False}
    )
    assert bridge is not None
    assert renderer._tokenizer.decode(bridge).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("sampled", "new"),
    [
        ("<think>I am not", [USER]),
        ("<think>I am not<|im_end|>", [USER]),
        ("Fine.<|endoftext|>", [USER]),
        ("Fine.<|im_end|>", []),
        ("Fine.<|im_end|>", [{"role": "assistant", "content": "No."}]),
        ("Fine.<|im_end|>", [{"role": "user", "content": "\u0001gspo\u0001"}]),
    ],
)
def test_what_no_prompt_looks_like_is_not_bridged(
    sampled: str, new: list[dict[str, Any]], tmp_path: Path, renderers: dict[str, TemplateRenderer]
) -> None:
    renderer = renderers["tags"]
    if "endoftext" in sampled:
        tokenizer = make(tmp_path / "model", TAGS, "<|im_end|>", eos_token_id=[ids(renderer, "<|endoftext|>")[0]])
        renderer = TemplateRenderer(tokenizer)
        assert ids(renderer, sampled)[-1] in renderer.stop_ids
    assert renderer.bridge(renderer.prompt_ids([USER]), ids(renderer, sampled), new) is None


def test_an_answer_that_a_role_ends_is_bridged_only_to_that_role(tmp_path: Path) -> None:
    plain = make(tmp_path / "plain", ROLES_STOP)
    stops = [plain.encode(marker)[0] for marker in ("<|user|>", "<|tool|>")]
    renderer = TemplateRenderer(make(tmp_path / "model", ROLES_STOP, eos_token_id=stops))
    prompt = renderer.prompt_ids([USER])
    to_tool = renderer.bridge(prompt, ids(renderer, "Hm<|tool|>"), [RESULT])
    assert to_tool is not None
    assert renderer._tokenizer.decode(to_tool) == "\nblue<|assistant|>\n"
    assert renderer.bridge(prompt, ids(renderer, "Hm<|user|>"), [RESULT]) is None


def test_a_template_that_drops_answers_is_not_bridged(tmp_path: Path) -> None:
    renderer = TemplateRenderer(make(tmp_path / "model", "{{ messages[0].content }}<|im_end|>"))
    assert renderer.bridge(renderer.prompt_ids([USER]), ids(renderer, "Hm<|im_end|>"), [USER]) is None


def test_a_bridge_without_a_stop_token_of_the_answer_is_none(tmp_path: Path) -> None:
    only_users = (
        "{%- for message in messages %}{{- message.content }}{%- if message.role == 'user' %}<|im_end|>{%- endif %}"
        "{%- endfor %}"
    )
    renderer = TemplateRenderer(make(tmp_path / "model", only_users))
    assert renderer.bridge(renderer.prompt_ids([USER]), ids(renderer, "Hm<|im_end|>"), [USER]) is None


def test_results_follow_a_turn_that_called(tmp_path: Path) -> None:
    called_otherwise = (
        "{%- for message in messages %}{{- message.content }}{%- for call in message.tool_calls or [] %}"
        "{{- call.function.name }}{%- endfor %}{{- '<|im_end|>' + ('!' if message.tool_calls else '') }}{%- endfor %}"
    )
    renderer = TemplateRenderer(make(tmp_path / "model", called_otherwise))
    prompt, sampled = renderer.prompt_ids([USER]), ids(renderer, "Hm<|im_end|>")
    assert renderer.bridge(prompt, sampled, [RESULT]) == ids(renderer, "!blue<|im_end|>")
    assert renderer.bridge(prompt, sampled, [USER]) == ids(renderer, "How is the weather?<|im_end|>")


@pytest.mark.parametrize("empty", [[], None])
def test_no_tool_calls_are_none_however_they_are_sent(empty: list[Any] | None, tmp_path: Path) -> None:
    asks = "{{- messages[0].content }}{%- if messages[0].tool_calls is defined %}CALLS{%- endif %}"
    renderer = TemplateRenderer(make(tmp_path / "model", asks))
    message = {"role": "assistant", "content": "Hm", "tool_calls": empty}
    assert renderer.prompt_ids([message]) == ids(renderer, "Hm")


def test_special_tokens_within_an_answer_are_no_text(renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers["tags"]
    sampled = ids(renderer, "a<|user|>b<think>c<|im_end|>d")
    assert renderer.text(sampled) == renderer.parse(sampled).content == "ab<think>c"
    assert renderer.stream().feed(sampled).content == "ab<think>c"


def test_special_tokens_that_are_asked_for_are_text_for_agents(renderers: dict[str, TemplateRenderer]) -> None:
    shown = TemplateRenderer(ChatTokenizer(renderers["tags"]._tokenizer.directory, show_special_tokens=True))
    sampled = ids(shown, "a<|user|>b<think>c<|im_end|>d")
    assert shown.text(sampled) == shown.parse(sampled).content == "a<|user|>b<think>c"
    assert shown.stream().feed(sampled).content == "a<|user|>b<think>c"


def test_answers_come_back_as_they_were_rendered(renderers: dict[str, TemplateRenderer]) -> None:
    for name, renderer in renderers.items():
        for seed in SEEDS:
            rng = random.Random(seed)
            calls = rng.randint(0, 2 if name == "tags" else 1)
            answer = assistant(rng, calls=calls, reasoning=name == "tags" and rng.random() < 0.5)
            tools = conversations.tools(rng)
            before = renderer.prompt_ids([USER])
            rest = renderer.prompt_ids([USER, answer, USER])[len(before) :]
            parsed = renderer.parse(rest[: 1 + next(i for i, token in enumerate(rest) if token in renderer.stop_ids)], tools)
            assert parsed.problem is None
            assert parsed.reasoning == answer.get("reasoning_content"), seed
            assert parsed.content == ("" if name == "bare" and calls else (answer["content"] or "").strip()), seed
            expected = [
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in answer.get("tool_calls", [])
            ]
            assert [(call.name, json.loads(call.arguments_json)) for call in parsed.tool_calls] == expected, seed


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("<tool_call>{</tool_call>", "cannot be read"),
        ('<tool_call>{"name": "f", "arguments": {}}', "is not closed"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "no name"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not a JSON object"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "JSON compliant"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "surrogates"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "too deep"),
    ],
)
def test_a_tool_call_that_cannot_be_read_is_text(written: str, problem: str, renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers["tags"]
    good = '<tool_call>{"name": "g", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}</tool_call>'
    parsed = renderer.parse(ids(renderer, "First. " + good + written + "<|im_end|>"))
    assert parsed.content == "First. " + written
    assert problem in (parsed.problem or "")
    assert [(call.name, call.arguments_json) for call in parsed.tool_calls] == [("g", '{"a": "\\ud800"}')]


def test_json_is_an_answer_where_no_tools_were_offered(renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers["bare"]
    written = '{"name": "f", "parameters": {"a": 1}}'
    assert renderer.parse(ids(renderer, written)).content == written
    tools = [{"type": "function", "function": {"name": "f"}}]
    parsed = renderer.parse(ids(renderer, written), tools)
    assert [(call.name, call.arguments_json) for call in parsed.tool_calls] == [("f", '{"a": 1}')]
    assert (parsed.content, parsed.problem) == ("", None)
    broken = renderer.parse(ids(renderer, '{"name": "f", "parameters": '), tools)
    assert (broken.tool_calls, broken.content) == ([], '{"name": "f", "parameters":')
    assert broken.problem is not None


def test_the_prompt_tells_that_the_reasoning_has_begun(renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers["tags"]
    opened = renderer.prompt_ids([USER], arguments={"open_thinking": True})
    sampled = ids(renderer, "Hm.</think>\n\nYes.<|im_end|>")
    parsed = renderer.parse(sampled, prompt_ids=opened)
    assert (parsed.reasoning, parsed.content) == ("Hm.", "Yes.")
    assert renderer.parse(sampled).reasoning is None
    cut = renderer.parse(sampled[:1], prompt_ids=opened)
    assert (cut.reasoning, cut.content) == (renderer.text(sampled[:1]).strip(), "")
    assert renderer.bridge(opened, sampled[:1], [USER]) is None


@pytest.mark.parametrize(
    ("messages", "tools", "arguments", "part"),
    [
        ([{"role": "user", "content": [{"type": "image_url"}]}], [], {}, "messages[0]: the content is not text"),
        ([{"content": "no role"}], [], {}, "messages[0]"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            [],
            {},
            "messages[1]",
        ),
        ([USER], [{"name": "f"}], {}, "tools[0]"),
        ([USER], [], {"messages": []}, "'messages'"),
        ([], [], {}, "refuses the conversation"),
    ],
)
def test_what_cannot_be_rendered_is_named(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], arguments: dict[str, Any], part: str,
    renderers: dict[str, TemplateRenderer],
) -> None:  # fmt: skip
    with pytest.raises(RenderingError) as caught:
        renderers["tags"].prompt_ids(messages, tools, arguments)
    assert part in str(caught.value)


def test_text_in_parts_is_text(renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers["tags"]
    parts = [{"type": "text", "text": "How is "}, {"type": "text", "text": "the weather?"}]
    assert renderer.prompt_ids([{"role": "user", "content": parts}]) == renderer.prompt_ids([USER])


def test_arguments_of_the_configuration_hold_until_a_call_gives_others(renderers: dict[str, TemplateRenderer]) -> None:
    tokenizer = ChatTokenizer(renderers["tags"]._tokenizer.directory, {"enable_thinking": False})
    renderer = create_renderer(tokenizer, "template")
    assert renderer.prompt_ids([USER]) == renderers["tags"].prompt_ids([USER], arguments={"enable_thinking": False})
    assert renderer.prompt_ids([USER], arguments={"enable_thinking": True}) == renderers["tags"].prompt_ids([USER])


@pytest.mark.parametrize("called", ["", "weather"])
@pytest.mark.parametrize("name", ["tags", "bare"])
def test_what_opens_a_call_is_how_the_template_writes_one(
    name: str, called: str, renderers: dict[str, TemplateRenderer]
) -> None:
    renderer = renderers[name]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    opening = renderer.call_opening(called, tools)
    assert opening is not None
    function = {"name": "weather", "arguments": '{"a": 1}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    text = renderer._tokenizer.render([USER, call], tools=tools, add_generation_prompt=False)
    begun = renderer.prompt_text([USER], tools) + renderer.text(opening)
    assert text.startswith(begun)
    [parsed] = renderer.parse([*opening, *ids(renderer, text.removeprefix(begun))], tools).tool_calls
    assert (parsed.name, json.loads(parsed.arguments_json)) == ("weather", {"a": 1})


@pytest.mark.parametrize("arguments", [{"open_thinking": True}, {"enable_thinking": False}])
def test_a_model_that_reasons_first_has_no_opening(
    arguments: dict[str, Any], renderers: dict[str, TemplateRenderer]
) -> None:
    opening = renderers["tags"].call_opening("", [], arguments)
    assert (opening is None) == ("open_thinking" in arguments)


def test_a_model_that_may_reason_first_has_no_opening(tmp_path: Path) -> None:
    """As Qwen 3: an answer without reasoning has an empty one, which would be put there in place of the model's own."""
    header = "{{- '<|im_start|>assistant\\n' }}\n        "
    thinking = TAGS.replace(header, header + "{{- '<think>\\n\\n</think>\\n\\n' }}")
    assert thinking != TAGS
    renderer = TemplateRenderer(make(tmp_path / "model", thinking))
    assert renderer.call_opening("", []) is None
    assert renderer.call_opening("", [], {"enable_thinking": False}) is not None


def test_a_format_without_tool_calls_has_no_opening(tmp_path: Path) -> None:
    renderer = TemplateRenderer(make(tmp_path / "model", ROLES_STOP, "<|user|>"))
    assert renderer.call_opening("", []) is None
