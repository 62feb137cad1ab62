"""The display of a run while it runs."""

from io import StringIO
from typing import Any

import pytest

from gspo_services.cli.run.display import Display, Look, number
from gspo_services.cli.run.happenings import Happening
from gspo_services.runs.track import Cursor, Sample
from gspo_services.shared.runtime.console import PlainConsole
from tests.support.cli.statuses import a_child, a_status


def shown(*snapshots: dict[str, Any] | None, terminal: bool = False, look: Look = "live") -> str:
    output = StringIO()
    console = PlainConsole(file=output, width=120, force_terminal=terminal, color_system=None)
    with Display(console, "runs/x", look=look) as display:
        for elapsed, status in enumerate(snapshots):
            display.show(status, [a_child("broker"), a_child("rollout-0"), a_child("rollout-1", "starting")], float(elapsed))
    return output.getvalue()


def test_off_a_terminal_there_is_one_line_for_each_change() -> None:
    lines = shown(None, None, a_status(), a_status(tokens_per_s=1.0), a_status(batches_trained=4)).splitlines()
    assert lines == [
        "[   0.0 s] starting: broker running, rollout-0 running, rollout-1 starting",
        "[   2.0 s] batch 3/60  version 4  reward 0.500  held-out -  lag 0.250  812 tokens/s  rollouts serving 1  "
        "batch 3: 5 of 8 groups",
        "[   4.0 s] batch 4/60  version 4  reward 0.500  held-out -  lag 0.250  812 tokens/s  rollouts serving 1  "
        "batch 3: 5 of 8 groups",
    ]


def test_while_processes_start_lines_say_what_each_does_and_for_how_long() -> None:
    output = StringIO()
    with Display(PlainConsole(file=output, width=120), "runs/x", look="plain") as display:
        early = a_status(rollouts=[])
        children = [a_child("learner"), a_child("rollout-0")]
        for elapsed_s, status, doing in (
            (1.0, None, {"learner": "starts", "rollout-0": "starts SGLang, 1 s"}),
            (2.0, early, {"learner": "starts", "rollout-0": "starts SGLang, 2 s"}),  # only seconds
            (3.0, early, {"rollout-0": "starts SGLang, 3 s"}),
            (4.0, None, {"rollout-0": "starts SGLang, 4 s"}),
            (18.0, early, {"rollout-0": "starts SGLang, 18 s: loading"}),
            (19.0, a_status(), {"rollout-1": "starts"}),
        ):
            display.doing = doing
            display.show(status, children, elapsed_s)
    assert [line[:60] for line in output.getvalue().splitlines()] == [
        "[   1.0 s] starting: learner starts, rollout-0 starts SGLang",
        "[   3.0 s] starting: learner running, rollout-0 starts SGLan",
        "[  18.0 s] starting: learner running, rollout-0 starts SGLan",
        "[  19.0 s] batch 3/60  version 4  reward 0.500  held-out -  ",
    ]


def test_the_table_says_what_starts_until_it_serves() -> None:
    console = PlainConsole(file=(output := StringIO()), width=120, force_terminal=True, color_system=None)
    with Display(console, "runs/x", look="live") as display:
        display.doing = {"rollout-0": "starts SGLang, 3 s", "rollout-1": "waits for weights, 1 s"}
        display.show(a_status(), [a_child("rollout-0"), a_child("rollout-1")], 0.0)
    assert "serving, version 4, 64 episodes" in output.getvalue()
    assert "SGLang" not in output.getvalue()
    assert "waits for weights, 1 s" in output.getvalue()


def test_on_a_terminal_there_is_a_table_of_the_run_and_its_processes() -> None:
    text = shown(a_status(), terminal=True)
    for part in ("3/60", "0.500 training", "- held out", "3 open, 5 ready", "1 dropped", "batch 3: 5 of 8 groups"):
        assert part in text
    assert "serving, version 4, 64 episodes" in text
    assert "quarantined, version 0, 0 episodes" in text


def test_who_has_the_device_is_shown_where_processes_share_it() -> None:
    for terminal, said in ((False, "rollouts serving 1  device: rollout-0  batch 3"), (True, "64 episodes, has the device")):
        console = PlainConsole(file=(output := StringIO()), width=120, force_terminal=terminal, color_system=None)
        with Display(console, "runs/x", look="live") as display:
            display.device_holder = "rollout-0"
            display.show(a_status(), [a_child("learner"), a_child("rollout-0")], 0.0)
        assert said in output.getvalue()


def test_plain_lines_can_be_asked_for_on_a_terminal() -> None:
    assert shown(a_status(), terminal=True, look="plain").startswith("[   0.0 s] batch 3/60")


def test_an_unknown_number_is_a_dash() -> None:
    assert [number(value) for value in (None, float("nan"), 0.0, 1.23456)] == ["-", "-", "0.000", "1.235"]
    nothing_yet = shown(a_status(lag_mean=None, lag_max=None, train_reward=None, tokens_per_s=None), terminal=True)
    assert "- largest" in nothing_yet
    assert "None" not in nothing_yet


LENGTHS = {"length/mean": 12.4, "length/p95": 20, "length/max": 30, "length/cut_off": 0.125}


def a_live_table(width: int, **options: Any) -> str:
    """The last table of a run that knows all that there is to know."""
    output = StringIO()
    console = PlainConsole(file=output, width=width, force_terminal=True, **options)
    with Display(console, "runs/a-rather-long-name-of-a-run", look="live") as display:
        rows = [{"event": "batch", "batch": index, "time_s": 4.0 * index, **LENGTHS} for index in range(4)]
        display.progress.take(
            [*rows, {"event": "eval", "policy_version": 1, "batch": 3, "eval/reward": 0.75, "time_s": 9.0}]
        )
        display.cursors["wandb"] = Cursor(tracker_run="r", line=40, behind=2)
        sample = Sample(
            task=0, prompt="What is 12 + 30?\n" * 9, answer="42\x1b[2J", reward=1.0, num_tokens=3, ended="length"
        )
        display.tell_sample(sample, 1.0)
        children = [a_child("broker"), a_child("rollout-0"), a_child("tracker-wandb")]
        display.show(a_status(eval_reward=0.5), children, 130.0)
    return output.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_fits_terminals_of_any_usual_width(width: int) -> None:
    text = a_live_table(width, color_system=None)
    plain = [line for line in text.replace("\x1b[", "\n").splitlines() if "batches" in line or "answers" in line]
    assert plain
    lines = text.splitlines()
    assert max(len(line) for line in lines if not line.startswith("\x1b")) <= width
    for part in ("3/60", "4 min", "0.750", "12 % cut off", "tracker-wandb", "40 lines sent", "rollout-0"):
        assert part in text.replace("\n", " "), (width, part)
    assert ("restarts" in text) == (width >= 80)
    assert "\x1b[2J" not in text


def test_without_colour_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32m" in a_live_table(100)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in a_live_table(100)


def test_quiet_shows_problems_and_nothing_else() -> None:
    output = StringIO()
    with Display(PlainConsole(file=output, width=120), "runs/x", look="quiet") as display:
        display.say("starting")
        display.show(a_status(), [a_child("broker")], 1.0)
        display.tell(Happening(text="checkpoint saved"), 2.0)
        display.tell(Happening(text="rollout-0 ended with status -9", is_problem=True), 3.0)
        display.tell_sample(Sample(task=0, prompt="a", answer="b", reward=1.0, num_tokens=1, ended="done"), 4.0)
    assert output.getvalue() == "[   3.0 s] ! rollout-0 ended with status -9\n"


def test_plain_lines_tell_events_lengths_and_the_end() -> None:
    output = StringIO()
    with Display(PlainConsole(file=output, width=120), "runs/x", look="plain") as display:
        display.progress.take([{"event": "batch", "batch": index, "time_s": 4.0 * index, **LENGTHS} for index in range(4)])
        display.tell(Happening(text="checkpoint\nsaved"), 1.0)
        display.show(a_status(), [a_child("broker")], 2.0)
        display.tell_sample(Sample(task=0, prompt="1+1=", answer="2", reward=1.0, num_tokens=1, ended="done"), 3.0)
    assert output.getvalue().splitlines() == [
        "[   1.0 s] checkpoint\\nsaved",
        "[   2.0 s] batch 3/60  version 4  reward 0.500  held-out -  lag 0.250  812 tokens/s  "
        "lengths 12 mean, 20 p95, 30 longest; 12 % cut off  ends in 4 min  rollouts serving 1  batch 3: 5 of 8 groups",
        "[   3.0 s] sample: 1+1= -> 2  (1 tokens)",
    ]
