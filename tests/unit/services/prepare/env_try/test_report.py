"""Episodes in a terminal: colours say what words say, and nothing that others say acts on the terminal."""

import json
from io import StringIO
from pathlib import Path

import pytest

from gspo_services.prepare.env_try.as_json import JsonReport
from gspo_services.prepare.env_try.player import PlayedEpisode
from gspo_services.prepare.env_try.prompts import Prompt
from gspo_services.prepare.env_try.report import TerminalReport
from gspo_services.prepare.env_try.watcher import PlayedTurn
from gspo_services.rollout.rendering import Parsed, ParsedCall
from gspo_services.rollout.tokenizer import ChatTokenizer
from gspo_services.runs.local_play import Mask, TokenRun
from gspo_services.shared.runtime.console import PlainConsole

HOSTILE = "\x1b[2J\u202e[bold]x[/]\x07\r"
SHOWN = r"\x1b[2J\u202e[bold]x[/]\x07\r"


def a_turn(text: str) -> PlayedTurn:
    call = {"function": {"name": text, "arguments": text}}
    messages = [{"role": text, "name": text, "content": text, "tool_calls": [call]}, {"role": "tool", "content": [text]}]
    answer = Parsed(content=text, reasoning=text, tool_calls=[ParsedCall(text, text)], problem=text)
    prompt = Prompt(token_ids=(1,), messages=messages, tools=[{"function": {"name": text}}], is_new=True)
    return PlayedTurn(number=1, prompt=prompt, context=[1], token_ids=[7], logprobs=[-0.5], end="stop", answer=answer)


def an_episode(tokenizer: ChatTokenizer, text: str, **fields: object) -> PlayedEpisode:
    ids = {use: tokenizer.encode(f"{use} {text}") for use in ("context", "trained", "discarded")}
    runs = [TokenRun(use=use, turn=0, token_ids=ids[use], logprobs=[-0.5] * len(ids[use])) for use in ids]  # type: ignore[arg-type]
    values = {"printed": [text], "failure": text, "remark": text, "refused": [{"role": text, "content": text}], **fields}
    return PlayedEpisode(split="train", index=0, seed=0, task={"a": text}, mask=Mask(sequences=[runs, runs]), **values)  # type: ignore[arg-type]


def shown(tokenizer: ChatTokenizer, text: str, **options: object) -> str:
    output = StringIO()
    console = PlainConsole(file=output, **{"width": 60, "color_system": None, **options})
    report = TerminalReport(console, tokenizer, num_episodes=1, with_tokens=True, with_logprobs=True)
    episode = an_episode(tokenizer, text)
    report.begins(episode)
    report.asked(a_turn(text))
    report.answered(a_turn(text))
    report.ended(episode)
    report.summary([episode])
    return output.getvalue()


@pytest.fixture(scope="module")
def tokenizer(chat_model: Path) -> ChatTokenizer:
    return ChatTokenizer(chat_model)


def test_hostile_text_is_shown_and_does_nothing(tokenizer: ChatTokenizer) -> None:
    out = shown(tokenizer, HOSTILE, width=4000)
    assert [character for character in HOSTILE if character in out and not character.isprintable()] == []
    assert out.count(SHOWN) >= 20
    harmless = shown(tokenizer, "harmless", width=4000)
    heads = [line.split("  ")[0] for line in harmless.splitlines() if not line.startswith(" ")]
    assert [line.split("  ")[0] for line in out.replace(SHOWN, "harmless").splitlines() if not line.startswith(" ")] == heads


def test_a_line_of_a_message_cannot_be_taken_for_ours(tokenizer: ChatTokenizer) -> None:
    out = shown(tokenizer, "x\nreward    1.0")
    assert "\nreward" not in out
    assert "\n    reward    1.0\n" in out


def test_each_use_has_a_colour_on_a_terminal_and_a_word_everywhere(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colours = {"trained": "\x1b[1;32m", "context": "\x1b[2m", "discarded": "\x1b[31m"}
    out = shown(tokenizer, "text", force_terminal=True, color_system="standard")
    for use, colour in colours.items():
        assert f"  {use:<10}{colour}{use} text\x1b[0m\n" in out
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(tokenizer, "text", force_terminal=True, color_system="standard")
    assert all(colour not in plain for colour in ("\x1b[1;32m", "\x1b[31m", "\x1b[1;36m"))
    file = shown(tokenizer, "text")
    assert "\x1b" not in file
    for use in colours:
        assert f"  {use:<10}{use} text\n" in file


def test_long_lines_are_folded_under_themselves_on_a_terminal_and_whole_in_a_file(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = "0123456789" * 20
    out = shown(tokenizer, text, force_terminal=True)
    assert all(len(line) <= 60 for line in out.splitlines() if line.startswith(" " * 4))
    assert out.count("\n    " + "0123456789" * 5) >= 3
    assert f"\n    {text}\n" in shown(tokenizer, text)


def test_json_escapes_what_acts_on_a_terminal(tokenizer: ChatTokenizer) -> None:
    output = StringIO()
    report = JsonReport(output, tokenizer)
    episode = an_episode(tokenizer, HOSTILE, turns=[a_turn(HOSTILE)])
    for hear in (report.begins, report.ended):
        hear(episode)
    report.answered(episode.turns[0])
    (line,) = output.getvalue().splitlines()
    assert line.isascii()
    assert line.isprintable()
    said = json.loads(line)
    assert (said["task"], said["printed"], said["turns"][0]["content"]) == ({"a": HOSTILE}, [HOSTILE], HOSTILE)
    assert [run["logprobs"] is None for run in said["sequences"][0]] == [True, False, False]
