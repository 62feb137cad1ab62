"""``gspo env try`` as a person or a program sees it, with environments; each error once."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_services.cli import main as cli
from gspo_services.prepare.env_try.command import main
from tests.support.engines.chat_models import TINY_TEMPLATE, chat_tokenizer, save_chat_model
from tests.support.trying.commands import AGENT, Try

ROOT = Path(__file__).parents[5]


def test_an_environment_is_played_with_an_echo(tries: Try) -> None:
    status, out, err = tries("--echo", "--tasks", "1")
    assert (status, err) == (0, "")
    patterns = [
        r"episode 1 of 1: train task 0, seed \d+",
        re.escape('task      {"word": "train0", "do": "", "thing": null}'),
        "the environment prints",
        "user",
        "    Say",
        "    train0",
        r"assistant \(turn 0, \d+ tokens, stop\)",
        "    Say",
        "    train0",
        "user",
        re.escape(r"    \x1b[2Jagain"),
        r"assistant \(turn 1, \d+ tokens, stop\)",
        re.escape(r"    \x1b[2Jagain"),
        r"tokens    \d+ trained, \d+ context, 0 discarded; 1 sequence",
        re.escape(r"  context   <|user|>Say\ntrain0<|end|><|assistant|>"),
        re.escape(r"  trained   Say\ntrain0<|end|>"),
        re.escape(r"  context   <|user|>\x1b[2Jagain<|end|><|assistant|>"),
        re.escape(r"  trained   \x1b[2Jagain<|end|>"),
        "reward    19; by turn 10, 9",
        r"time      \d+\.\d\d s: \d+\.\d\d in the model, \d+\.\d\d in your code",
        "",
        "1 episode: 1 with a reward; mean 19, from 19 to 19",
    ]
    lines = out.splitlines()
    assert len(lines) == len(patterns)
    assert [(pattern, line) for pattern, line in zip(patterns, lines, strict=True) if not re.fullmatch(pattern, line)] == []


def test_json_has_the_tokens_and_their_use_and_no_word_of_the_environment(tries: Try) -> None:
    tried = tries("--answer", "yes", "--json", "--index", "3", "--split", "eval", do="job")
    assert (tried.status, tried.err) == (0, "the environment prints\n")
    (episode,) = tried.episodes
    assert (episode["split"], episode["index"], episode["task"]["word"]) == ("eval", 3, "eval3")
    (runs,) = episode["sequences"]
    assert [(run["use"], run["turn"], run["text"]) for run in runs] == [
        ("context", 0, "<|user|>Say\neval3<|end|><|assistant|>"),
        ("trained", 0, "yes<|end|>"),
        ("context", 1, "<|user|>\x1b[2Jagain<|end|><|assistant|>"),
        ("trained", 1, "yes<|end|>"),
    ]
    assert episode["num_tokens"]["trained"] == 2 * len(runs[1]["token_ids"])
    assert (episode["reward"], episode["turn_rewards"]) == (8.0, [4.0, 4.0])
    assert episode["components"] == {"right": 2.0, "long": 6.0}
    assert [turn["content"] for turn in episode["turns"]] == ["yes", "yes"]


def test_tasks_are_chosen_and_end_where_there_are_no_more(tries: Try) -> None:
    def played(*words: str) -> list[int]:
        return [episode["index"] for episode in tries("--echo", "--json", *words).episodes]

    assert played() == [0, 1, 2]
    assert played("--index", "2") == [2]
    assert played("--index", "3", "--tasks", "9") == [3, 4]
    status, _, err = tries("--echo", "--index", "5")
    assert status == 2
    assert "--index is 5" in err
    assert "tasks 0 to 4" in err


@pytest.mark.parametrize("words", [["--index", "-1"], ["--index", "x"], ["--tasks", "0"], ["--echo", "--type"]])
def test_a_wrong_command_line_is_refused(tries: Try, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tries(*words)
    assert ended.value.code == 2
    assert words[-1] in capsys.readouterr().err.splitlines()[-1]


def test_a_seed_belongs_to_the_task_and_the_run(tries: Try) -> None:
    episodes = [
        episode for seed in (0, 1) for episode in tries("--echo", "--json", "--tasks", "2", **{"run.seed": seed}).episodes
    ]
    assert len({episode["seed"] for episode in episodes}) == 4


@pytest.mark.parametrize(
    ("do", "said", "has_place"),
    [
        ("no row", "task 0 (train) cannot be leased: LookupError: no row 0", True),
        ("odd task", "task 0 (train) cannot be leased: ValueError: task holds a object", False),
        ("no field", "environment start failed: KeyError: 'wrod'", True),
        ("raise", "environment step failed: ZeroDivisionError: the user's own mistake", True),
        ("nan", "no reward: the reward of the environment's step is nan (float): expected a finite number", False),
        ("odd state", "the environment's state is not plain data", False),
    ],
)
def test_an_error_of_an_environment_is_shown_with_its_place(tries: Try, do: str, said: str, has_place: bool) -> None:
    tried = tries("--echo", "--json", "--tasks", "1", do=do)
    (episode,) = tried.episodes
    assert (tried.status, episode["reward"], episode["end"]) == (1, None, "failed")
    first, *places = episode["failure"].splitlines()
    assert said in first
    assert bool(places) == has_place
    assert all(re.fullmatch(r".*tests/support/trying/tried\.py:\d+ in \w+", place) for place in places)
    assert episode["num_tokens"]["trained"] == 0
    status, out, _ = tries("--echo", "--tasks", "1", do=do)
    assert status == 1
    assert f"failed\n    {first}" in out
    assert all(f"    {place}\n" in out for place in places)
    assert out.endswith("1 episode: 0 with a reward; 1 failed\n")


def test_what_an_episode_that_failed_has_sampled_is_discarded(tries: Try) -> None:
    (episode,) = tries("--answer", "yes", "--json", "--tasks", "1", do="raise").episodes
    assert [[run["use"] for run in runs] for runs in episode["sequences"]] == [["context", "discarded"]]


def test_an_environment_that_cannot_be_made_ends_the_command(tries: Try) -> None:
    status, out, err = tries("--echo", do="cannot be made")
    assert (status, out) == (2, "")
    assert "RuntimeError: no database\n" in err
    assert re.search(r"tests/support/trying/tried\.py:\d+ in __init__\n$", err)
    status, _, err = tries("--echo", **{"environment.name": "no_such:Environment"})
    assert status == 2
    assert err.startswith('gspo env try: environment "no_such:Environment": ')
    assert err.count("\n") == 1, "the places are ours"


def test_a_template_that_refuses_is_shown_with_what_it_refuses(tries: Try, strict_model: Path) -> None:
    status, out, _ = tries("--echo", "--tasks", "1", "--model", str(strict_model), do="refused")
    assert status == 1
    failure = out[out.index("\nfailed\n") :]
    assert "the chat template refuses the conversation: TemplateError: roles must alternate user/assistant" in failure
    assert "tool\n    Say\n    train0\n" in failure


THINKS = TINY_TEMPLATE.replace(
    "{{- '<|assistant|>' -}}",
    "{{- '<|assistant|>' -}}{%- if enable_thinking is defined and enable_thinking is false -%}[off]{%- endif -%}",
)


@pytest.mark.parametrize("keys", [{}, AGENT])
def test_variables_of_the_template_are_those_of_the_configuration(tries: Try, tmp_path: Path, keys: dict[str, str]) -> None:
    thinks = save_chat_model(tmp_path / "thinks", chat_tokenizer(THINKS, "<|end|>"))
    words = ("--answer", "yes", "--json", "--tasks", "1", "--model", str(thinks))
    (usual,) = tries(*words, **keys).episodes
    (episode,) = tries(*words, "--set", "model.template_arguments={enable_thinking = false}", **keys).episodes
    contexts = [run["text"] for run in episode["sequences"][0] if run["use"] == "context"]
    assert [text.endswith("<|assistant|>[off]") for text in contexts] == [True] * len(contexts)
    assert [text + "[off]" for text in (run["text"] for run in usual["sequences"][0] if run["use"] == "context")] == contexts
    status, _, err = tries(*words, "--set", "agent.template_arguments={enable_thinking = false}", **keys)
    assert status == 2
    assert "agent.template_arguments is {'enable_thinking': False}: the key is now called model.template_arguments" in err


def test_rewards_see_special_tokens_where_they_are_asked_for(tries: Try) -> None:
    words = ("--answer", "<|tool|>yes", "--json", "--tasks", "1")
    (hidden,) = tries(*words).episodes
    (shown,) = tries(*words, "--set", "model.show_special_tokens=true").episodes
    assert [turn["content"] for turn in hidden["turns"]] == ["yes"] * 2
    assert [turn["content"] for turn in shown["turns"]] == ["<|tool|>yes"] * 2
    assert hidden["turn_rewards"] == [len("yes")] * 2
    assert shown["turn_rewards"] == [len("<|tool|>yes")] * 2
    (agents,) = tries(*words, "--set", "model.show_special_tokens=true", **AGENT).episodes
    assert {turn["content"] for turn in agents["turns"]} == {"<|tool|>yes"}


def test_a_turn_that_is_cut_off_and_an_overlong_episode_are_said(tries: Try) -> None:
    words = ["--answer", "some long text", "--tasks", "1"]
    keys = {"sampling.max_turn_tokens": 2, "objective.overlong_filter_tokens": 10}
    (episode,) = tries(*words, "--json", **keys).episodes
    assert (episode["end"], episode["turns"][0]["end"]) == ("length", "length")
    assert [run["use"] for run in episode["sequences"][0]] == ["context", "discarded"]
    assert "objective.overlong_filter_tokens = 10 leaves it out" in episode["remark"]
    status, out, _ = tries(*words, **keys)
    assert status == 0
    assert "ended by its length" in out
    (episode,) = tries(*words, "--json", **keys | {"objective.overlong_filter_tokens": 200}).episodes
    assert (episode["sequences"][0][1]["use"], episode["remark"]) == ("trained", None)


def test_nothing_is_left_behind_and_no_log_is_shown(tries: Try, tmp_path: Path) -> None:
    status, out, err = tries("--echo", "--tasks", "1", do="nan", **AGENT)
    assert (status, err) == (1, "")
    assert "agent_failed" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["my.toml"]


def test_a_run_beside_it_keeps_its_port(tries: Try) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert tries("--echo", "--tasks", "1", **AGENT, **{"agent.port": port}).status == 0
        status, _, err = tries("--echo", "--tasks", "1", **{"agent.port": port, "agent.url": "http://127.0.0.1:9"})
    assert status == 2, "a service may know the port"
    assert str(port) in err


def test_without_a_model_torch_is_not_loaded(tries: Try) -> None:
    tries("--echo", "--tasks", "1")
    code = (
        "import sys; from gspo_services.prepare.env_try.command import main; "
        f"main([{str(tries.config)!r}, '--echo', '--tasks', '1']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_an_interrupt_ends_it_while_it_waits(tries: Try) -> None:
    tries("--echo", "--tasks", "1")
    words = [sys.executable, "-m", "gspo_services.prepare.env_try.command", str(tries.config), "--type"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "    train0\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        # Its input stays open until then: an end of the input would be another way to end.
        process.wait(timeout=120)
        assert process.stderr is not None
        err = process.stderr.read()
    assert (process.returncode, err) == (130, "\ngspo env try: interrupted\n")


def test_the_command_is_found_and_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: became.append(words))
    cli.main(["env", "try", "my.toml", "--echo"])
    tool = ["-m", "gspo_services.cli.tool", "gspo_services.prepare.env_try.command"]
    assert became[0][-5:] == [*tool, "my.toml", "--echo"]
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"  gspo env try my.toml {words}" in text for words in ("--model", "--url", "--echo", "--answer", "--type"))
    assert max(map(len, text.splitlines())) <= 130


COMPARED = {"reward.group": "tests.support.reward_functions:beside", "batch.group_size": 3}


def test_a_group_is_played_and_compared(tries: Try) -> None:
    status, out, err = tries("--echo", **COMPARED)
    assert (status, err) == (0, "")
    assert "episode 3 of 3: train task 0" in out
    assert "alone     19; by turn 10, 9" in out
    after = out[out.index("task 0: reward.group compares its 3 episodes\n") :].splitlines()
    assert after[1:4] == [f"reward    episode {number}: 19; from alone 19, shorter 0; alone 19" for number in (1, 2, 3)]
    assert after[-1] == "3 episodes: 3 with a reward; mean 19, from 19 to 19"


def test_json_has_the_rewards_of_the_group(tries: Try) -> None:
    tried = tries("--echo", "--json", do="job", **COMPARED)
    assert tried.status == 0
    assert [episode["index"] for episode in tried.episodes] == [0, 0, 0]
    assert len({episode["seed"] for episode in tried.episodes}) == 3
    for episode in tried.episodes:
        assert (episode["reward"], episode["reward_alone"]) == (21.0, 21.0)
        assert episode["components"] == {"right": 2.0, "long": 19.0, "alone": 21.0, "shorter": 0.0}


def test_held_out_tasks_are_graded_alone(tries: Try) -> None:
    (episode,) = tries("--echo", "--json", "--split", "eval", "--tasks", "1", **COMPARED).episodes
    assert (episode["reward"], episode["reward_alone"]) == (18.0, None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"reward.group": "tests.support.reward_functions:too_few"}, "wrong_length: reward.group returned 2 rewards"),
        ({"environment.options": {"do": "nan"}}, "failed    episode 3: no reward"),
    ],
)
def test_a_group_without_rewards_is_a_failure(tries: Try, changed: dict[str, Any], said: str) -> None:
    tried = tries("--echo", **{**COMPARED, **changed})
    assert tried.status == 1
    assert said in tried.out


def test_agents_are_compared_too(tries: Try) -> None:
    tried = tries("--echo", "--json", **COMPARED, **AGENT)
    assert tried.status == 0
    assert [(episode["reward_alone"], episode["reward"]) for episode in tried.episodes] == [(1.5, 1.5)] * 3
    assert tried.episodes[0]["components"] == {"right": 1.0, "short": 0.5, "alone": 1.5, "shorter": 0.0}


def test_a_function_that_cannot_compare_ends_the_command(tries: Try) -> None:
    status, _, err = tries("--echo", **{**COMPARED, "reward.group": "tests.support.reward_functions:of_others"})
    assert status == 2
    assert "as reward.group it is called with completions and task" in err
