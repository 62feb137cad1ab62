"""Chat templates: what transformers makes of them, where they are found, and what cannot go on from sampled tokens."""

import json
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gspo_services.rollout.rendering import create_renderer
from gspo_services.rollout.tokenizer import ChatTokenizer, TokenizerError
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model

USER = {"role": "user", "content": "1+1?"}
SAID = {"role": "assistant", "content": "2"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"ä": {}}}}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"b": [1, "é"], "a": 2}}}],
}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "3"}
TURNS = "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endfor %}"
OPENS = "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"


def model(directory: Path, template: str = TINY_TEMPLATE, **tokenizer_config: Any) -> Path:
    """A model directory whose template is a file, with more keys in tokenizer_config.json."""
    save_chat_model(directory, chat_tokenizer(template, "<|end|>"))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **tokenizer_config}))
    return directory


def as_transformers(directory: Path, messages: Any, tools: Any = None, **arguments: Any) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    arguments = {"add_generation_prompt": True, **arguments}
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **arguments))


@pytest.mark.parametrize(
    "template",
    [
        # What the assistant says, marked: with all kinds of whitespace, in a loop, with a variable of its own.
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}<|end|>"
        "{% endgeneration %}{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}" + OPENS,
        "{% for m in messages %}\n  {%- generation -%}\n  {{ m.content }}\n  {%- endgeneration %}\n!\n{% endfor %}",
        "{% for m in messages %}\n  {% generation %}\n{{ m.content }}\n  {% endgeneration %}\n{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% set n = namespace(x=1) %}{% generation %}{% set n.x = 2 %}{% endgeneration %}{{ n.x }}",
        "{% macro f(x) %}{% generation %}[{{ x }}]{% endgeneration %}{% endmacro %}{{ f(messages[0].content) }}",
        # JSON: arguments by place and by name.
        "{{ tools | tojson }}",
        "{{ tools | tojson(indent=2) }}{{ tools | tojson(True) }}{{ tools | tojson(false, 4) }}",
        "{{ tools | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=true) }}",
        "{{ tools | tojson(false, none, (', ', ': '), true) }}{{ tools is none }}",
        "{{ messages[0] | tojson }}{{ messages | tojson(sort_keys=True) }}",
        # Loops that are left early, variables, tokens, what is not defined.
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content }}{% if loop.last %}"
        "{% break %}{% endif %}{% endfor %}",
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ unk_token is defined }}|{{ image_token }}|"
        "{{ video_token }}|{{ documents is none }}|{{ nothing }}",
        "{{ enable_thinking is defined and enable_thinking is false }}{{ add_generation_prompt }}",
        "{{ strftime_now('%Y-%m-%d') }}",
        "\n\n{{ messages[0].content }}\n\n\n",
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ messages[0]['content'] | upper }}{{ messages[-1].role }}",
    ],
)
def test_a_template_says_what_it_says_in_transformers(template: str, tmp_path: Path) -> None:
    more = {"image_token": "<|user|>", "extra_special_tokens": {"video_token": "<|tool|>"}}
    directory = model(tmp_path / "model", **more)
    (directory / "chat_template.jinja").write_text(template)
    ours = ChatTokenizer(directory)
    for messages in ([USER], [USER, SAID, USER], [USER, CALLED, RESULT]):
        for tools in (None, [TOOL]):
            for arguments in ({}, {"enable_thinking": False}, {"add_generation_prompt": False}):
                expected = as_transformers(directory, messages, tools, **arguments)
                opens = arguments.get("add_generation_prompt", True)
                values = {key: value for key, value in arguments.items() if key != "add_generation_prompt"}
                assert ours.template.exactly(messages, tools or (), values, add_generation_prompt=opens) == expected


def test_the_time_is_that_of_the_machine_as_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model(tmp_path / "model", "{{ strftime_now('%H') }}")
    monkeypatch.setenv("TZ", "XXX-12")
    time.tzset()
    try:
        assert ChatTokenizer(directory).render([USER]) == datetime.now().strftime("%H")
    finally:
        monkeypatch.undo()
        time.tzset()


LLAMA = (
    "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}Today: {{ date_string }}|"
)
GRANITE = "{% if tools %}{{ strftime_now('%B %d, %Y') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "said", "writes"),
    [
        (LLAMA, "26 Jul 2024", "Today: 26 Jul 2024|"), (LLAMA, "2024-07-26", "Today: 2024-07-26|"),
        (GRANITE, "26 Jul 2024", "July 26, 2024"), (GRANITE, "2024-07-26", "July 26, 2024"),
    ],
)  # fmt: skip
def test_a_date_among_the_variables_is_the_date_of_the_run(template: str, said: str, writes: str, tmp_path: Path) -> None:
    directory = model(tmp_path / "model", template + TURNS)
    ours = ChatTokenizer(directory)
    assert ours.template.reads_clock(ours.template_arguments)
    pinned = ChatTokenizer(directory, {"date_string": said})
    assert not pinned.template.reads_clock(pinned.template_arguments)
    assert pinned.render([USER], tools=[TOOL]).startswith(writes + "<|user|>")


def test_a_template_without_a_date_reads_no_clock(tmp_path: Path) -> None:
    unread = "{% if false %}{{ strftime_now('%Y') }}{% endif %}"
    for place, template in enumerate((TURNS, unread + TURNS)):
        assert not ChatTokenizer(model(tmp_path / str(place), template)).template.reads_clock()


def test_a_date_in_no_known_form_pins_only_what_takes_it_as_it_is(tmp_path: Path) -> None:
    for place, (template, reads) in enumerate(((LLAMA, False), (GRANITE, True))):
        ours = ChatTokenizer(model(tmp_path / str(place), template + TURNS), {"date_string": "one day"})
        assert ours.template.reads_clock(ours.template_arguments) is reads


def test_an_endless_generation_block_is_refused_with_its_line(tmp_path: Path) -> None:
    directory = model(tmp_path / "model", "\n{% generation %}x")
    with pytest.raises(TokenizerError, match=r"chat_template.jinja: chat template line 2: .*endgeneration"):
        ChatTokenizer(directory)


SEVERAL = [
    {"name": "default", "template": f"default{TURNS}"},
    {"name": "tool_use", "template": f"tools{TURNS}"},
    {"name": "rag", "template": "{% broken"},
]


def test_of_several_templates_the_one_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    directory = model(tmp_path / "model", chat_template=SEVERAL)
    (directory / "chat_template.jinja").unlink()
    ours = ChatTokenizer(directory)
    for tools in (None, [TOOL]):
        assert ours.render([USER], tools=tools or ()) == as_transformers(directory, [USER], tools)
    assert ours.render([USER]).startswith("default<|user|>")
    assert ours.render([USER], tools=[TOOL]).startswith("tools<|user|>")


def test_templates_in_files_replace_those_of_the_configuration(tmp_path: Path) -> None:
    directory = model(tmp_path / "model", f"file{TURNS}", chat_template=SEVERAL)
    assert ChatTokenizer(directory).render([USER], tools=[TOOL]) == as_transformers(directory, [USER], [TOOL])
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(f"folder{TURNS}")
    for tools in (None, [TOOL]):
        assert ChatTokenizer(directory).render([USER], tools=tools or ()) == as_transformers(directory, [USER], tools)
    assert ChatTokenizer(directory).render([USER], tools=[TOOL]).startswith("folder")


@pytest.mark.parametrize(
    ("configured", "part"),
    [
        ([{"name": "tool_use", "template": "x"}], "none is called 'default': copy the one to train with"),
        ([{"name": "default"}], "expected a text, or a list"),
        ([{"name": "default", "template": "x"}, {"name": "default", "template": "y"}], "with different names"),
        (["x"], "expected a text, or a list"),
        (3, "chat_template is '3': expected a text"),
        ([], "no chat_template.jinja and no chat_template"),
        (None, "copy chat_template.jinja from its chat model"),
    ],
)
def test_templates_that_are_not_there_are_refused_with_the_way_out(configured: Any, part: str, tmp_path: Path) -> None:
    directory = model(tmp_path / "model", chat_template=configured)
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError) as caught:
        ChatTokenizer(directory)
    assert part in str(caught.value)
    assert str(directory) in str(caught.value)


def test_special_tokens_of_older_models_have_a_file_of_their_own(tmp_path: Path) -> None:
    directory = model(tmp_path / "model", "{{ bos_token }}|{{ eos_token }}|{{ cls_token }}")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("added_tokens_decoder", "bos_token")}
    (directory / "tokenizer_config.json").write_text(json.dumps(kept))
    (directory / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|user|>"}, "cls_token": "<|tool|>"}')
    assert ChatTokenizer(directory).render([USER]) == as_transformers(directory, [USER]) == "<|user|>|<|end|>|<|tool|>"


PARTS = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' }}{%- for part in m.content %}{%- if part.type == 'text' %}"
    "{{- part.text }}{%- endif %}{%- endfor %}{{- '<|end|>' }}{%- endfor %}" + OPENS
)
VERBATIM = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- call.function.name }}{{ call.function.arguments }}{%- endfor %}{{- '<|end|>' }}{%- endfor %}" + OPENS
)


def test_a_template_gets_text_in_parts_where_it_takes_no_other(tmp_path: Path) -> None:
    directory = model(tmp_path / "model", PARTS)
    messages = [USER, SAID, USER]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert ChatTokenizer(directory).render(messages) == as_transformers(directory, parts)
    assert ChatTokenizer(directory).render(parts) == as_transformers(directory, parts)
    assert ChatTokenizer(directory).observation_ids([USER]) == ChatTokenizer(directory).encode(
        "<|user|>1+1?<|end|><|assistant|>"
    )


@pytest.mark.parametrize("written", ["{{ call.function.arguments }}", "{{ '' + call.function.arguments }}"])
def test_a_template_gets_arguments_as_json_where_it_writes_no_objects(written: str, tmp_path: Path) -> None:
    directory = model(tmp_path / "model", VERBATIM.replace("{{ call.function.arguments }}", written))
    text = ChatTokenizer(directory).render([USER, CALLED, RESULT])
    assert 'add{"b": [1, "é"], "a": 2}<|end|>' in text
    objects = model(tmp_path / "objects", VERBATIM.replace("arguments }}", "arguments | tojson }}"))
    assert ChatTokenizer(objects).render([USER, CALLED, RESULT]) == text


def test_messages_of_rows_and_of_clients_are_the_same_for_environments_and_agents(tmp_path: Path) -> None:
    template = TURNS.replace("m.content", "m.content + (enable_thinking | default('') | string)") + OPENS
    directory = model(tmp_path / "model", template)
    tokenizer = ChatTokenizer(directory, {"enable_thinking": False})
    messages: list[Mapping[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "1+1?", "name": "me"},
    ]
    expected = tokenizer.encode("<|system|>Be brief.False<|end|><|user|>1+1?False<|end|><|assistant|>")
    assert tokenizer.prompt_ids(messages) == expected
    renderer = create_renderer(tokenizer, "template")
    assert renderer.prompt_ids(messages) == expected
    assert tokenizer.observation_ids([USER]) == tokenizer.encode("<|user|>1+1?False<|end|><|assistant|>")
    said = tokenizer.encode("2False<|end|>")
    assert renderer.bridge(expected, said, [USER]) == tokenizer.observation_ids([USER])
    assert "False" not in tokenizer.decode(renderer.prompt_ids(messages, (), {"enable_thinking": ""}))


def test_a_variable_that_the_renderer_sets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"model.template_arguments: template argument 'tools'"):
        ChatTokenizer(model(tmp_path / "model"), {"tools": []})


# What ends an answer: other tokens first, as in Cohere's; another one than the newest answer's, as in gpt-oss.
SENDS_TWO = TURNS.replace("m.content +", "m.content + ('<|tool|>' if m.role == 'assistant' else '') +") + OPENS
ENDS_TWICE = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}{%- if m.role == 'assistant' and not loop.last %}"
    "{{- '<|im_end|>' }}{%- else %}{{- '<|end|>' }}{%- endif %}{%- endfor %}" + OPENS
)
COUNTS = "{{- messages | length }}" + TURNS + OPENS
LAST_USER = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' }}{%- if loop.last and tools %}{{- tools | tojson }}{%- endif %}"
    "{{- m.content + '<|end|>' }}{%- endfor %}" + OPENS
)


def test_tokens_before_the_end_of_an_answer_belong_to_it(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(model(tmp_path / "model", SENDS_TWO))
    renderer = create_renderer(tokenizer, "template")
    prompt, rest = tokenizer.prompt_ids([USER]), tokenizer.encode("<|user|>1+1?<|end|><|assistant|>")
    assert tokenizer.observation_ids([USER]) == rest
    assert renderer.bridge(prompt, tokenizer.encode("2<|tool|><|end|>"), [USER]) == rest
    # The model left it out, so the format has no such text; an answer that was cut gets both.
    assert renderer.bridge(prompt, tokenizer.encode("2<|end|>"), [USER]) is None
    assert renderer.bridge(prompt, tokenizer.encode("2"), [USER]) == [*tokenizer.encode("<|tool|><|end|>"), *rest]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ENDS_TWICE, "ends an earlier answer with other tokens"),
        (COUNTS, "rewrites earlier messages when others follow"),
        ("{{- messages[0].content }}<|end|>", "drops the assistant's content"),
        ("{%- if messages | length > 1 %}{{- raise_exception('one turn') }}{%- endif %}" + TURNS + OPENS, "one turn"),
    ],
)
def test_a_conversation_that_cannot_go_on_is_refused_with_the_reason(template: str, reason: str, tmp_path: Path) -> None:
    directory = model(tmp_path / "model", template)
    tokenizer = ChatTokenizer(directory)
    with pytest.raises(TokenizerError, match=reason) as caught:
        tokenizer.observation_ids([USER])
    assert str(directory) in str(caught.value)
    renderer = create_renderer(tokenizer, "template")
    assert renderer.bridge(tokenizer.prompt_ids([USER]), tokenizer.encode("2<|end|>"), [USER]) is None


def test_tools_that_move_with_the_last_message_are_not_bridged(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(model(tmp_path / "model", LAST_USER))
    renderer = create_renderer(tokenizer, "template")
    said = tokenizer.encode("2<|end|>")
    assert renderer.bridge(renderer.prompt_ids([USER], [TOOL]), said, [USER], [TOOL]) is None
    assert renderer.bridge(renderer.prompt_ids([USER]), said, [USER]) == tokenizer.observation_ids([USER])


@pytest.mark.parametrize(
    ("template", "said"), [(LLAMA, "Today: 03 Feb 2021|"), ("{{ strftime_now('%B %d, %Y') }}", "February 03, 2021<")]
)
def test_prompts_have_the_day_on_which_the_run_began(template: str, said: str, tmp_path: Path) -> None:
    """Also those that were rendered before it was known."""
    ours = ChatTokenizer(model(tmp_path / "model", template + TURNS))
    before = ours.prompt_ids([USER])
    ours.run_began("")
    assert ours.prompt_ids([USER]) == before
    ours.run_began("03 Feb 2021")
    assert ours.render([USER]).startswith(said)
    assert ours.prompt_ids([USER]) == ours.encode(ours.render([USER]))
    for chosen in ("26 Jul 2024", "a Tuesday"):
        pinned = ChatTokenizer(model(tmp_path / chosen, LLAMA + TURNS), {"date_string": chosen})
        pinned.run_began("03 Feb 2021")
        assert pinned.render([USER]).startswith(f"Today: {chosen}|")
