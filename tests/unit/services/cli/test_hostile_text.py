"""Text that peers say never breaks a display, forges a line of it, or reaches the terminal raw, whatever field it is in."""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import gspo_services
from gspo_services.broker.refresh import REFUSED
from gspo_services.cli.audit import print_audit
from gspo_services.cli.data import _wait as wait_for_addition
from gspo_services.cli.doctor.command import report
from gspo_services.cli.doctor.observe import Log, Observation, read_log
from gspo_services.cli.run.display import Display
from gspo_services.cli.run.plot import write_plot
from gspo_services.cli.run.report import summary_table
from gspo_services.cli.run.supervisor import last_error
from gspo_services.prepare.check.command import main as check
from gspo_services.runs.audit import Checkpoint, audit_run
from gspo_services.runs.export.card import CardFacts, model_card
from gspo_services.runs.export.choice import ChosenCheckpoint
from gspo_services.runs.metrics import read_metrics
from gspo_services.shared.runtime.console import PlainConsole
from gspo_services.shared.runtime.plain_text import indented_lines, one_line
from gspo_services.shared.settings.sections import EnvironmentSection, Model, Run, Settings
from tests.support.cli import statuses
from tests.support.cli.pages import HEALTHY, a_page, a_rollout, a_status, without_broker
from tests.support.processes.small_run import write_small_run
from tests.support.runs.spoiled import spoil

HOSTILE = {
    "closing_tag": "answer [/INST] now",
    "tags": "[bold red]wrong:[/] [link=http://x]click[/link] :skull:",
    "escapes": "\x1b[2J\x1b]0;title\x07\x9b31m",
    "new_lines": "x\r\nnothing is wrong\u2028nothing is wrong\x0bnothing is wrong\x85nothing is wrong",
    "turned_round": "\u202egnorw si gnihton\u2066",
    "surrogate": "\ud800 and \udfff",
    "huge": "[" * 1_000_000,
}
FORBIDDEN = ("\x1b", "\x07", "\x9b", "\r", "\x0b", "\x85", "\u2028", "\u202e", "\ud800")
WIDTH = 4000
NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE)
def text(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def shown(show: Callable[[PlainConsole], object], **options: Any) -> str:
    """What ``show`` prints; a terminal's own sequences are checked apart."""
    output = StringIO()
    show(PlainConsole(file=output, **({"width": WIDTH, "color_system": None} | options)))
    return output.getvalue()


def assert_harmless(output: str, lines: int) -> None:
    """``lines``: as many as the same display has of harmless text."""
    assert [character for character in FORBIDDEN if character in output] == []
    assert "nothing is wrong" not in output.splitlines()
    output.encode()
    assert len(output) < 200_000
    assert len(output.split("\n")) == lines


def with_text_everywhere(value: Any, text: str) -> Any:
    """``value`` with ``text`` in place of every string in it, except where the code looks it up."""
    if isinstance(value, dict):
        return {key: item if key in ("status", "peer") else with_text_everywhere(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [with_text_everywhere(item, text) for item in value]
    return text if isinstance(value, str) else value


def observations(text: str) -> list[Observation]:
    """Runs in which ``text`` is all that was said."""
    status = with_text_everywhere(a_status(stopping="x", error="x", learner_waiting="x", learner_session="y"), text)
    status |= {
        "dropped": {text: 3, "failed": 1},
        "rollouts": [a_rollout(text, status="quarantined"), a_rollout("r", status=text)],
    }
    pages = {name: a_page(False, text) for name in ("broker", "learner", "rollout-0", text)}
    log = Log(event=text, age_s=1.0, error=text, warnings={text: 9})
    logs = dict.fromkeys(("broker", "learner", "rollout-0", text), log)
    with_broker = replace(HEALTHY, status=status, pages=pages, logs=logs)
    running = replace(with_broker, status=status | {"stopping": "", "error": text, "learner": None})
    return [
        with_broker,
        running,
        replace(with_broker, status=status | {"finished": True}),
        replace(without_broker(logs=logs), no_status=text, turned_away=True),
        replace(without_broker(logs=logs), no_status=text),
        replace(without_broker(logs=logs), no_ledger=text, ledger=None, unread=[text]),
    ]


def test_the_doctor_shows_hostile_text_as_text(text: str) -> None:
    for seen, harmless in zip(observations(text), observations("x y"), strict=True):
        expected = shown(lambda console, seen=harmless: report(seen, console)).count("\n") + 1
        assert_harmless(shown(lambda console, seen=seen: report(seen, console)), expected)


def test_text_in_brackets_stays_readable() -> None:
    (seen, *_) = observations(HOSTILE["closing_tag"])
    output = shown(lambda console: report(seen, console))
    assert "the run has failed: answer [/INST] now" in output
    assert "the run is stopping: answer [/INST] now" in output


def displayed(status: dict[str, Any], text: str, **options: Any) -> str:
    def show(console: PlainConsole) -> None:
        with Display(console, text, look="live" if options else "plain") as display:
            display.say(text)
            display.show(None, [statuses.a_child(text, text)], 0.0)
            display.show(status, [statuses.a_child("broker", text), statuses.a_child("rollout-0")], 1.0)

    return shown(show, **options)


@pytest.mark.parametrize("field", ["waiting_for", "stopping", "error"])
def test_plain_progress_shows_hostile_text_as_text(text: str, field: str) -> None:
    assert_harmless(displayed(statuses.a_status(**{field: text}), text), lines=4)


@pytest.mark.parametrize("field", ["waiting_for", "stopping", "error"])
def test_the_live_table_shows_hostile_text_as_text(text: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_services.cli.run.display.Live", JustPrints)
    rollouts = [{"peer": "rollout-0", "status": text, "policy_version": 1, "leases": 0}]
    status = statuses.a_status(**{field: text}, rollouts=rollouts)
    calm = statuses.a_status(**{field: "x"}, rollouts=rollouts)
    output = displayed(status, text, force_terminal=True)
    assert_harmless(output, lines=displayed(calm, "x", force_terminal=True).count("\n") + 1)
    assert "2/60" not in output
    assert "3/60" in output


class JustPrints:
    """In the place of rich's Live, whose own sequences move the cursor: prints what it would show."""

    def __init__(self, *, console: PlainConsole, refresh_per_second: float) -> None:
        self._console = console

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update(self, table: Any) -> None:
        self._console.print(table)


def test_a_huge_text_leaves_room_for_the_rest_of_the_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_services.cli.run.display.Live", JustPrints)
    status = statuses.a_status(waiting_for="wait " * 100_000, error="error " * 100_000)
    assert displayed(status, "x", force_terminal=True, width=100).count("\n") < 30


def test_the_audit_shows_hostile_rows_as_text(text: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    write_small_run(directory)
    stored = text.encode(errors="backslashreplace").decode()
    calm = shown(lambda console: print_audit(audit_run(directory), console)).count("\n")
    quoted = stored.replace("'", "''")
    spoil(directory, f"UPDATE groups SET drop_reason = '{quoted}' WHERE drop_reason = 'failed'")
    audit = audit_run(directory)
    output = shown(lambda console: print_audit(audit, console))
    assert_harmless(output, lines=output.count("\n") + 1)
    assert output.count("\n") <= calm + 2 * (len(audit.problems) + 2)
    assert one_line(stored, 40).partition("...")[0][:40] in output


def test_the_report_of_a_run_takes_what_its_metrics_file_says(text: str, tmp_path: Path) -> None:
    rows = [
        {"event": "batch", "batch": number, "reward_mean": value, "time_s": text, "tokens_per_s": value, "lag/all": text}
        for number, value in enumerate([0.5, 1.7e308, -1.7e308, text, None, True, 10**400, [text]])
    ]
    rows += [{"event": "eval", "batch": text, "eval/reward": 0.5}, {"event": text}, {"event": "dropped", "reason": text}]
    texts = (json.dumps({"line": number, **row}) + "\n" for number, row in enumerate(rows, start=1))
    (tmp_path / "metrics.jsonl").write_text("".join(texts))
    found = read_metrics(tmp_path)
    assert_harmless(output := shown(lambda console: console.print(summary_table(found))), output.count("\n") + 1)
    assert write_plot(found).stat().st_size > 0


def test_lines_of_a_metrics_file_end_at_new_lines_only(tmp_path: Path) -> None:
    row = {"event": "batch", "batch": 0, "note": HOSTILE["new_lines"]}
    texts = (json.dumps({"line": 1, **row}, ensure_ascii=False), json.dumps({"line": 2, **row}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(texts) + "\n")
    found = read_metrics(tmp_path)
    assert (len(found.batches), found.damage) == (1, ())


def test_the_end_of_a_log_is_read_whatever_it_says(text: str, tmp_path: Path) -> None:
    log = tmp_path / "broker.log"
    event = {"event": "stopped_by_error", "error": text, "timestamp": NOW.isoformat(), "level": text}
    log.write_text(json.dumps(event) + "\n")
    assert_harmless(one_line(last_error(log)), 1)
    read_log(log, NOW)
    log.write_bytes(text.encode(errors="surrogatepass") + b"\n")
    assert_harmless(indented_lines(last_error(log)), indented_lines(last_error(log)).count("\n") + 1)
    assert read_log(log, NOW) is None


def test_an_error_of_a_command_is_one_harmless_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "\0" in text or "\ud800" in text or len(text) > 5000:
        pytest.skip("no argument can be this")
    assert check([str(tmp_path / text)]) == 2
    error = capsys.readouterr().err
    assert [character for character in FORBIDDEN if character in error] == []


def test_check_shows_hostile_settings_as_text(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "\ud800" in text:
        pytest.skip("TOML has no surrogates")
    config = tmp_path / "run.toml"
    config.write_text(f"[environment.options]\ntext = {json.dumps(text)}\n")
    assert check([str(config), "--settings"]) == 0
    output = capsys.readouterr().out
    assert json.loads(output)["environment"]["options"]["text"] == text
    assert [character for character in FORBIDDEN if character in output] == []
    assert check([str(config), "--explain", "environment.options"]) == 0
    assert [character for character in FORBIDDEN if character in capsys.readouterr().out] == []
    check([str(config), "--no-code", "--set", f"model.path={tmp_path}"])
    assert [character for character in FORBIDDEN if character in capsys.readouterr().out] == []


def test_every_character_that_does_not_show_itself_is_written_out() -> None:
    assert one_line("a\x1b\n\t\u202e\ud800b") == "a\\x1b\\n\\t\\u202e\\ud800b"
    assert one_line("Grüße 你好 🙂") == "Grüße 你好 🙂"
    assert one_line("x" * 10, most=4) == "xxxx... (10 characters)"
    assert one_line(None) == "None"
    assert indented_lines("a\n    b\nnothing is wrong") == "a\n    b\n    nothing is wrong"


def test_the_card_of_an_export_shows_hostile_names_as_text(text: str) -> None:
    if "\ud800" in text:
        pytest.skip("no setting can be this")
    card = model_card(facts_with(text))
    assert [character for character in FORBIDDEN if character in card] == []
    calm = model_card(facts_with("x"))
    assert len(card.splitlines()) == len(calm.splitlines())
    title, *sections = [line for line in card.split("\n") if line.startswith("#")]
    assert "<" not in title
    assert [line.partition(" ")[0] for line in sections] == ["##"] * 6


def facts_with(text: str) -> CardFacts:
    name = f"x`\n# {text[:200]}<script>".replace("/", "")
    settings = Settings(
        run=Run(directory=Path("/runs") / name),
        model=Model(path=Path("/models") / name),
        environment=EnvironmentSection(name="dataset", options={"text": name, "of": [name]}),
    )
    checkpoint = Checkpoint(name="version-1", policy_version=1, batch_position=1)
    choice = ChosenCheckpoint(checkpoint=checkpoint, evaluation=None)
    return CardFacts(settings=settings, choice=choice, metrics=None, num_parameters=1, published=None)


PRINTS = re.compile(r"(?:print|std(?:out|err)\.write)\((.*)", re.DOTALL)
SAID = re.compile(r"\{(?:str\()?(?:error|reason|why|text|detail|leaf|refused\b)[^}]*\}")


def test_every_command_shows_what_others_said_through_the_one_function() -> None:
    """Consoles are made printable by their class, and lines that quote an error or a reason by ``plain_text``."""
    services = Path(gspo_services.__file__).parent
    raw = []
    for path in sorted(services.rglob("*.py")):
        # The worker of agents and the sandbox's first program speak to us alone, with the standard library alone.
        if path.is_relative_to(services / "tasks") or path.name == "console.py":
            continue
        source = path.read_text(encoding="utf-8")
        raw += [f"{path}: rich's own console"] if re.search(r"^\s*from rich.*\bConsole\b", source, re.MULTILINE) else []
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call) or not PRINTS.match(call := ast.unparse(node)):
                continue
            if SAID.search(call) and "one_line(" not in call and "indented_lines(" not in call:
                raw.append(f"{path}:{node.lineno}: {call}")
    assert raw == []


def test_why_rows_were_refused_is_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_small_run(run)
    (run / REFUSED).mkdir(parents=True)
    (run / REFUSED / "rows.reason.txt").write_text("row 3 says \x1b[2J\u202e", encoding="utf-8")
    assert wait_for_addition(run, run / "rows", "digest", 60.0) == 1
    assert capsys.readouterr().err == "gspo data: refused: row 3 says \\x1b[2J\\u202e\n"
