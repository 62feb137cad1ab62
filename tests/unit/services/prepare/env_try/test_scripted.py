"""Answers without a model are tokens as an engine makes them."""

import asyncio
import os
from pathlib import Path

import pytest

from gspo_services.prepare.env_try.prompts import Prompt, Prompts, WatchedTokenizer
from gspo_services.prepare.env_try.scripted import TextEngine, TypedAnswers, echo, fixed, stop_id_of
from gspo_services.rollout.sglang import EngineError, GenerateRequest, SamplingParameters
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.shared.settings import Settings
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model


async def said(tokenizer: ChatTokenizer, text: str, most: int = 100, **sampling: tuple[int, ...]) -> tuple[str, str | None]:
    """What an engine that answers ``text`` gives, and how it ends."""
    parameters = SamplingParameters(max_new_tokens=most, **{"stop_token_ids": tuple(tokenizer.stop_ids), **sampling})
    request = GenerateRequest(rid="r", input_ids=[1, 2], sampling=parameters)
    pieces = [piece async for piece in TextEngine(tokenizer, Prompts(), fixed(text)).generate(request)]
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    assert all(run.num_tokens == len(piece.token_ids) for piece in pieces for run in piece.version_runs)
    return tokenizer.decode([token for piece in pieces for token in piece.token_ids.tolist()]), pieces[-1].finish_reason


async def test_a_text_ends_with_the_templates_stop_token(chat_model: Path) -> None:
    tokenizer = ChatTokenizer(chat_model)
    assert await said(tokenizer, "hello") == ("hello<|end|>", "stop")
    assert await said(tokenizer, "") == ("<|end|>", "stop")
    assert await said(tokenizer, "hello<|end|>and more") == ("hello<|end|>", "stop")


async def test_a_text_is_cut_by_the_room_that_there_is(chat_model: Path) -> None:
    tokenizer = ChatTokenizer(chat_model)
    num_tokens = len(tokenizer.encode("a long text"))
    assert await said(tokenizer, "a long text", num_tokens + 1) == ("a long text<|end|>", "stop")
    assert await said(tokenizer, "a long text", num_tokens) == ("a long text", "length")
    first, *_ = tokenizer.encode("a long text")
    assert await said(tokenizer, "a long text", stop_token_ids=(first,)) == (tokenizer.decode([first]), "stop")


def test_of_several_stop_tokens_the_one_of_the_template_counts(tmp_path: Path) -> None:
    saved = chat_tokenizer(TINY_TEMPLATE, "<|end|>")
    pad, end = saved.convert_tokens_to_ids(["<|pad|>", "<|end|>"])
    assert pad < end
    tokenizer = ChatTokenizer(save_chat_model(tmp_path, saved, eos_token_id=[pad, end]))
    assert stop_id_of(tokenizer) == end


async def test_an_echo_repeats_the_last_message_of_its_own_prompt(chat_model: Path) -> None:
    prompts = Prompts()
    tokenizer = WatchedTokenizer(Settings.model_validate({"model": {"path": chat_model}}), prompts)
    first = tokenizer.prompt_ids([{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    other = tokenizer.prompt_ids([{"role": "user", "content": "three"}])
    tail = tokenizer.observation_ids([{"role": "user", "content": "four"}])
    assert [await echo(prompts.found(ids)) for ids in (first, other, [*first, 5, 6, *tail])] == ["two", "three", "four"]
    assert prompts.found([9, *first]) is None, "a new conversation has nothing before it"
    assert await echo(None) == ""
    assert await echo(Prompt(token_ids=(1,), messages=[{"role": "user", "content": None}], is_new=True)) == ""
    prompts.clear()
    assert prompts.found(first) is None


async def test_lines_are_answers_in_the_order_in_which_they_are_asked_for() -> None:
    reading, writing = os.pipe()
    shown: list[str] = []
    answers = TypedAnswers(reading, shown.append)
    os.write(writing, b"one\ntwo\\\nmore\n\nthr")
    assert await asyncio.gather(answers.answer(None), answers.answer(None), answers.answer(None)) == ["one", "two\nmore", ""]
    assert shown == ["assistant> ", "assistant> ", "> ", "assistant> "]
    os.write(writing, b"\xc3")
    os.write(writing, b"\xa9\xff")
    os.close(writing)
    assert await answers.answer(None) == "thr\u00e9\ufffd"
    for _ in range(2):
        with pytest.raises(EngineError, match="standard input has ended"):
            await answers.answer(None)
    os.close(reading)
