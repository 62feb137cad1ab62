"""Answers while they are sampled: every split gives the whole text, nothing uncertain is given out, stop strings cut."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_services.rollout.rendering import Parsed, RenderingError, without_stop
from gspo_services.rollout.rendering.answer_text import AnswerText
from gspo_services.rollout.rendering.decoder import TextDecoder
from gspo_services.rollout.rendering.interface import Markers, ParsedCall
from gspo_services.rollout.rendering.stops import StopStrings, num_held
from gspo_services.rollout.rendering.template import TemplateRenderer
from gspo_services.rollout.tokenizer import ChatTokenizer
from tests.unit.services.rollout.rendering.models import BARE, TAGS, make, make_byte_fallback

TOOLS = [{"type": "function", "function": {"name": "f"}}]
WORDS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "</thi", "END", "EN", " ", "\n", "ü", "🙂", "{", "}",
    "a", ".",
    '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {}}', "<|im_end|>", "<|user|>",
)  # fmt: skip


def wrapped(directory: Path) -> ChatTokenizer:
    """Bytes, but in a decoder that is not known to be one of bytes."""
    make(directory, TAGS)
    path = directory / "tokenizer.json"
    plain = json.loads(path.read_text())
    plain["decoder"] = {"type": "Sequence", "decoders": [plain["decoder"]]}
    path.write_text(json.dumps(plain))
    return ChatTokenizer(directory)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    directory = tmp_path_factory.mktemp("models")
    return {
        "tags": make(directory / "tags", TAGS),
        "bare": make(directory / "bare", BARE, "<|end|>", markers=()),
        "byte fallback": make_byte_fallback(directory / "fallback"),
        "wrapped": wrapped(directory / "wrapped"),
    }


@pytest.fixture(scope="module")
def renderers(tokenizers: dict[str, ChatTokenizer]) -> dict[str, TemplateRenderer]:
    return {name: TemplateRenderer(tokenizers[name]) for name in ("tags", "bare")}


def decoded(answer: AnswerText, ids: Sequence[int]) -> str:
    decoder = TextDecoder(answer)
    return "".join(decoder.feed(token) for token in ids) + decoder.finish()


@pytest.mark.parametrize("name", ["tags", "byte fallback", "wrapped"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_tokens_one_by_one_have_the_text_of_all(
    name: str, data: st.DataObject, tokenizers: dict[str, ChatTokenizer]
) -> None:
    tokenizer = tokenizers[name]
    answer = AnswerText(tokenizer, Markers(), tokenizer.stop_ids)
    # Mostly tokens of single bytes: those make characters that are incomplete or wrong.
    one = st.one_of(st.integers(0, 262), st.integers(0, tokenizer.vocab_size + 5))
    ids = data.draw(st.lists(one, max_size=30))
    assert decoded(answer, ids) == answer.text(ids)


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=150, deadline=None)
def test_what_is_given_out_is_never_taken_back(text: str, tokenizers: dict[str, ChatTokenizer]) -> None:
    tokenizer = tokenizers["tags"]
    answer = AnswerText(tokenizer, Markers(), tokenizer.stop_ids)
    ids = [token for token in tokenizer.encode(text) if token not in tokenizer.special_ids]
    decoder = TextDecoder(answer)
    given_out = ""
    for index, token in enumerate(ids):
        given_out += decoder.feed(token)
        whole = answer.text(ids[: index + 1])
        assert whole.startswith(given_out)
        assert "\ufffd" not in given_out or "\ufffd" in text
        # Not more than one character waits.
        assert len(whole) - len(given_out) <= 1


def streamed(
    renderer: TemplateRenderer, ids: Sequence[int], splits: Sequence[int], prompt: Sequence[int], stops: Sequence[str] = ()
) -> tuple[str, str, Parsed]:
    """Reasoning and content as a client puts them together, and the parsed answer."""
    stream = renderer.stream(stops, prompt)
    pieces = []
    begin = 0
    for end in [*sorted(splits), len(ids)]:
        pieces.append(stream.feed(ids[begin:end]))
        begin = end
    sampled = list(ids) if stream.stopped_at is None else list(ids[: stream.stopped_at])
    parsed = without_stop(renderer.parse(sampled, TOOLS, prompt_ids=prompt), stops)
    said = "".join(piece.content for piece in pieces)
    assert parsed.content.startswith(said), (parsed, said)
    thought = "".join(piece.reasoning for piece in pieces)
    assert (parsed.reasoning or "").startswith(thought), (parsed, thought)
    rest = stream.finish(parsed)
    return thought + rest.reasoning, said + rest.content, parsed


@pytest.mark.parametrize("name", ["tags", "bare"])
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=12),
    splits=st.lists(st.integers(0, 40), max_size=6),
    opened=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_split_gives_the_parsed_answer(
    name: str, words: list[str], splits: list[int], opened: bool, renderers: dict[str, TemplateRenderer]
) -> None:
    renderer = renderers[name]
    ids = renderer._tokenizer.encode("".join(words))
    prompt = renderer._tokenizer.encode("<think>\n" if opened else "x")
    reasoning, content, parsed = streamed(renderer, ids, splits, prompt)
    assert content == parsed.content
    assert reasoning == (parsed.reasoning or "")


@given(words=st.lists(st.sampled_from(WORDS), max_size=12), splits=st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=150, deadline=None)
def test_a_stop_string_ends_the_answer_where_it_is_complete(
    words: list[str], splits: list[int], renderers: dict[str, TemplateRenderer]
) -> None:
    renderer = renderers["tags"]
    ids = renderer._tokenizer.encode("".join(words))
    stops = ["END", "a."]
    stream = renderer.stream(stops)
    stream.feed(ids)
    first = next((n for n in range(len(ids) + 1) if any(stop in renderer.text(ids[:n]) for stop in stops)), None)
    assert stream.stopped_at == first
    _, content, parsed = streamed(renderer, ids, splits, [], stops)
    assert content == parsed.content
    assert not any(stop in content for stop in stops)


def test_a_call_is_held_back_and_text_before_it_is_not(renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers["tags"]
    stream = renderer.stream()
    encode = renderer._tokenizer.encode
    assert stream.feed(encode("I will look")).content == "I will look"
    assert stream.feed(encode(".\n")).content == "."
    assert stream.feed(encode("<")).content == ""
    assert stream.feed(encode(" b")).content == "\n< b"
    assert stream.feed(encode('<tool_call>{"name": "f", "arguments": {}}</tool_call> And?')).content == ""
    parsed = Parsed(content="I will look.\n< b And?", tool_calls=[ParsedCall("f", "{}")])
    assert stream.finish(parsed).content == " And?"


def test_reasoning_is_given_out_as_reasoning(renderers: dict[str, TemplateRenderer]) -> None:
    stream = renderers["tags"].stream()
    encode = renderers["tags"]._tokenizer.encode
    assert (stream.feed(encode("<think>Hm")).reasoning, stream.feed(encode("m.</th")).reasoning) == ("Hm", "m.")
    piece = stream.feed(encode("ree</think>\n\nYes"))
    assert (piece.reasoning, piece.content) == ("</three", "Yes")


def test_after_a_stop_string_nothing_is_taken(renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers["tags"]
    stream = renderer.stream(["\nUser:"])
    ids = renderer._tokenizer.encode("Fine.\nUser: and you?")
    pieces = [stream.feed([token]) for token in ids]
    assert "".join(piece.content for piece in pieces) == "Fine."
    assert stream.stopped_at is not None
    assert renderer.text(ids[: stream.stopped_at]) == "Fine.\nUser:"
    assert stream.feed(ids).content == ""


def test_an_empty_stop_string_is_refused(renderers: dict[str, TemplateRenderer]) -> None:
    with pytest.raises(RenderingError, match="at least one character"):
        renderers["tags"].stream(["END", ""])


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    strings=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_stop_strings_are_found_whatever_the_pieces(pieces: list[str], strings: list[str]) -> None:
    matcher = StopStrings(strings)
    text = ""
    for piece in pieces:
        text += piece
        at = matcher.feed(piece)
        begins = [text.find(string) for string in strings if string in text]
        assert at == (min(begins) if begins else None)
        if at is not None:
            return


@given(text=st.text("ab<", max_size=8), marker=st.text("ab<", min_size=1, max_size=4))
def test_what_may_begin_a_marker_is_held(text: str, marker: str) -> None:
    expected = max(n for n in range(len(marker)) if text.endswith(marker[:n]))
    assert num_held(text, [marker]) == expected


@pytest.mark.parametrize("name", ["tags", "bare"])
def test_no_ids_are_too_odd(name: str, renderers: dict[str, TemplateRenderer]) -> None:
    renderer = renderers[name]
    for seed in range(30):
        rng = random.Random(seed)
        ids = [rng.choice((rng.randrange(600), rng.randrange(256), -1, 10**12)) for _ in range(10_000 if seed < 3 else 50)]
        parsed = renderer.parse(ids, TOOLS, prompt_ids=ids[:3])
        stream = renderer.stream(["ab"], ids[:3])
        for token in ids:
            stream.feed([token])
        parsed.content.encode()
        stream.finish(parsed)
