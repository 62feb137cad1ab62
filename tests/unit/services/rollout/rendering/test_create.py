"""Which renderer a model gets, with and without the package of families."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo_services.rollout.rendering import RenderingError, create_renderer, families
from gspo_services.rollout.rendering.library import Family, LibraryRenderer
from gspo_services.rollout.tokenizer import ChatTokenizer
from tests.support.engines import conversations
from tests.unit.services.rollout.rendering.models import TAGS, make

USER = {"role": "user", "content": "How is the weather?"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return make(tmp_path_factory.mktemp("model") / "tags", TAGS)


class Package:
    """``renderers`` as far as a family uses it: its parser answers or fails as it is told."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.bridged: Any = None

    def get_stop_token_ids(self) -> list[int]:
        return []

    def parse_response(self, *_: object, **__: object) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def bridge_to_next_turn(self, *_: object, **__: object) -> Any:
        return self.bridged

    def call(self, **values: Any) -> SimpleNamespace:
        return SimpleNamespace(**{"name": "f", "arguments": {}, "status": "ok", "token_span": None, "raw": "raw", **values})


@pytest.fixture
def package() -> Package:
    return Package()


@pytest.fixture
def renderer(tokenizer: ChatTokenizer, package: Package, monkeypatch: pytest.MonkeyPatch) -> LibraryRenderer:
    monkeypatch.setattr(Family, "__init__", lambda self, *_: setattr(self, "name", "some"))
    monkeypatch.setattr(Family, "variant", lambda *_: package)
    return LibraryRenderer(tokenizer, Family(tokenizer, "some"))


def test_the_template_is_enough_where_the_package_is_missing(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families.importlib.util, "find_spec", lambda _: None)
    assert create_renderer(tokenizer).name == "template"
    with pytest.raises(RenderingError, match=r"gspo\[agents\]"):
        create_renderer(tokenizer, "qwen3")


def test_a_name_that_is_no_renderer_is_refused_with_those_that_are(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families.importlib.util, "find_spec", lambda _: True)
    with pytest.raises(RenderingError, match=r"qwen3\.5"):
        create_renderer(tokenizer, "qwen4")


def test_what_the_package_cannot_read_is_text(renderer: LibraryRenderer, package: Package, tokenizer: ChatTokenizer) -> None:
    package.answer = RuntimeError("odd")
    ids = tokenizer.encode(" Fine.<|im_end|>")
    parsed = renderer.parse([*ids, -1, 10**9])
    assert (parsed.content, parsed.problem) == ("Fine.", "the answer cannot be read: RuntimeError")


def test_calls_that_the_package_could_not_read_stay_in_the_content(
    renderer: LibraryRenderer, package: Package, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a format that only the package reads."""
    monkeypatch.setattr(renderer, "_format", "none")
    ids = tokenizer.encode("I look.<tool_call>{</tool_call>")
    span = (ids.index(tokenizer.encode("<tool_call>")[0]), len(ids))
    calls = [
        package.call(arguments={"a": "ü"}),
        package.call(status="invalid_json", token_span=span),
        package.call(name=None),
        package.call(arguments='{"b": 1}'),
        package.call(arguments={"b": 2}, raw='name\n{"b": 1, "b": 2}'),
    ]
    package.answer = SimpleNamespace(content="I look.", reasoning_content=" Hm.\n", tool_calls=calls)
    parsed = renderer.parse(ids)
    assert [(call.name, call.arguments_json) for call in parsed.tool_calls] == [("f", '{"a": "ü"}'), ("f", '{"b": 1}')]
    assert parsed.content == "I look.\n<tool_call>{</tool_call>\nraw\nname\n" + '{"b": 1, "b": 2}'
    assert parsed.problem == "a tool call cannot be read: invalid_json"
    assert parsed.reasoning == "Hm."


def test_the_package_says_where_calls_begin_and_we_read_them(
    renderer: LibraryRenderer, package: Package, tokenizer: ChatTokenizer
) -> None:
    """It takes the first closing tag for the end of a call, and other keys than its own for no arguments."""
    written = '<tool_call>{"name": "f", "parameters": {"a": "</tool_call>"}}</tool_call>'
    ids = tokenizer.encode(f"I look.{written} Done.<|im_end|>")
    begin = ids.index(tokenizer.encode("<tool_call>")[0])
    calls = [package.call(token_span=(begin, begin + 9)), package.call(status="unclosed_block", token_span=(begin + 9, 99))]
    package.answer = SimpleNamespace(content="I look.", reasoning_content=None, tool_calls=calls)
    parsed = renderer.parse(ids)
    assert [(call.name, call.arguments_json) for call in parsed.tool_calls] == [("f", '{"a": "</tool_call>"}')]
    assert (parsed.content, parsed.problem) == ("I look.\n Done.", None)


def test_the_package_bridges_only_reasoning_without_an_end(
    renderer: LibraryRenderer, package: Package, tokenizer: ChatTokenizer
) -> None:
    prompt = renderer.prompt_ids([USER])
    cut, whole, stopped = (tokenizer.encode(text) for text in ("<think>Hm", "Hm", "<think>Hm<|im_end|>"))
    package.bridged = SimpleNamespace(token_ids=[*prompt, *cut, 1, 2])
    assert renderer.bridge(prompt, cut, [USER]) == [1, 2]
    assert renderer.bridge(prompt, whole, [USER]) == renderer._template.bridge(prompt, whole, [USER]) != [1, 2]
    package.bridged = SimpleNamespace(token_ids=[*prompt, *stopped, 1, 2])
    assert renderer.bridge(prompt, stopped, [USER]) is None
    for changed in ([*prompt, *cut], [*prompt, *cut[:-1], 9, 1, 2], prompt):
        package.bridged = SimpleNamespace(token_ids=changed)
        assert renderer.bridge(prompt, cut, [USER]) is None
    package.bridged = None
    assert renderer.bridge(prompt, cut, [USER]) is None


def test_the_package_reads_what_the_template_writes(tokenizer: ChatTokenizer) -> None:
    pytest.importorskip("renderers")
    renderer = create_renderer(tokenizer, "qwen3")
    template = create_renderer(tokenizer, "template")
    assert (renderer.name, create_renderer(tokenizer).name) == ("qwen3", "template")
    for seed in range(20):
        rng = random.Random(seed)
        answer = conversations.assistant(rng, calls=rng.randint(0, 2), reasoning=rng.random() < 0.5)
        before = renderer.prompt_ids([USER], TOOLS)
        after = renderer.prompt_ids([USER, answer, USER], TOOLS)[len(before) :]
        sampled = after[: 1 + next(index for index, token in enumerate(after) if token in renderer.stop_ids)]
        assert renderer.parse(sampled, TOOLS) == template.parse(sampled, TOOLS)
        assert renderer.bridge(before, sampled, [USER], TOOLS) == after[len(sampled) :]


def test_json_is_a_call_only_with_tools_and_only_where_it_is_one(
    renderer: LibraryRenderer, package: Package, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package takes any object with a name for a call, without arguments where it finds none."""
    monkeypatch.setattr(renderer, "_format", "json")
    for written, num_calls in (('{"name": "Bob", "age": 3}', 0), ('{"name": "f", "parameters": {"a": "x"}}', 1)):
        ids = tokenizer.encode(written)
        package.answer = SimpleNamespace(
            content="", reasoning_content=None, tool_calls=[package.call(token_span=(0, len(ids)))]
        )
        assert (renderer.parse(ids).content, renderer.parse(ids).tool_calls) == (written, [])
        parsed = renderer.parse(ids, TOOLS)
        assert [call.arguments_json for call in parsed.tool_calls] == ['{"a": "x"}'] * num_calls
        assert parsed.content == ("" if num_calls else written)


def test_a_block_is_read_from_its_beginning_where_the_package_names_a_place_within(
    renderer: LibraryRenderer, package: Package, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "_format", "kimi")
    call = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "é"}<|tool_call_end|>'
    section = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    before, inside = tokenizer.encode("Ü <|tool_calls_section_begin|> is a mark. <|tool_calls_section_begin|>"), section[28:]
    ids = [*before, *tokenizer.encode(inside)]
    package.answer = SimpleNamespace(
        content="Ü", reasoning_content=None, tool_calls=[package.call(token_span=(len(before), len(ids)))]
    )
    parsed = renderer.parse(ids)
    assert [(call.name, call.arguments_json) for call in parsed.tool_calls] == [("f", '{"a": "é"}')]
    assert (parsed.content, parsed.problem) == ("Ü", None)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": "x </tool_call> y"}}\n</tool_call>', '{"a": "x </tool_call> y"}'),
        ('<tool_call>\n{"name": "f", "parameters": {"a": "x"}}\n</tool_call>', '{"a": "x"}'),
        ('<tool_call>\n{"name": "f", "args": {"a": "x"}}\n</tool_call>', None),
    ],
)
def test_both_renderers_read_the_same_calls(written: str, expected: str | None, tokenizer: ChatTokenizer) -> None:
    pytest.importorskip("renderers")
    sampled = tokenizer.encode(f"<think>Hm.</think>I look.\n{written}<|im_end|>")
    for renderer in (create_renderer(tokenizer, "qwen3"), create_renderer(tokenizer, "template")):
        parsed = renderer.parse(sampled, TOOLS)
        assert [call.arguments_json for call in parsed.tool_calls] == ([] if expected is None else [expected])
        assert (parsed.problem is None) == (expected is not None)
        assert (expected is None) == (written in parsed.content)
        assert parsed.reasoning == "Hm."


def test_the_package_ends_reasoning_that_was_cut(tokenizer: ChatTokenizer) -> None:
    pytest.importorskip("renderers")
    renderer = create_renderer(tokenizer, "qwen3")
    bridge = renderer.bridge(renderer.prompt_ids([USER]), tokenizer.encode("<think>Hm"), [USER])
    assert bridge is not None
    assert tokenizer.decode(bridge).startswith("</think><|im_end|>\n<|im_start|>user\n")
    unknown = renderer.bridge(renderer.prompt_ids([USER]), tokenizer.encode("<think>Hm"), [USER], [], {"mood": "good"})
    assert unknown is None


def test_a_family_whose_tokens_are_missing_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("renderers")
    with pytest.raises(RenderingError, match="<tool_call>"):
        create_renderer(make(tmp_path / "model", TAGS, markers=()), "qwen3")
