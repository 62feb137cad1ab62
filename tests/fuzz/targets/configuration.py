"""Targets for what people write: configuration files, overrides, keys, options of environments, rows of data sets."""

import json
from functools import cache
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any, Final

import msgpack

from gspo.tasks.environments import Environment, TaskSet
from gspo_services.shared.net.security import KeyFileError, Security, read_public_keys
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import load_settings
from gspo_services.shared.settings.fingerprint import run_fingerprint
from gspo_services.shared.settings.run_settings import SETTINGS_FILE, read_run_settings
from gspo_services.shared.settings.sections import SecuritySection, Settings
from gspo_services.tasks.environments.registry import ENVIRONMENTS, TASK_SETS, create_task_set
from tests.fuzz.mutate import mutate_bytes, mutate_json, mutate_json_lines, mutate_lines
from tests.fuzz.scratch import scratch, written
from tests.fuzz.target import Target, require

EXAMPLES: Final = Path(__file__).parents[3] / "examples"


def _require_stable(settings: Settings) -> None:
    """The settings that a broker writes are the settings that others read."""
    plain = settings.model_dump(mode="json")
    text = json.dumps(plain)
    again = Settings.model_validate(json.loads(text)).read_in(settings.folder, settings.told_paths)
    require(json.dumps(again.model_dump(mode="json")) == text, f"settings changed in settings.json: {text}")
    require(run_fingerprint(again) == run_fingerprint(settings), "settings have another fingerprint in settings.json")


def _require_printable(error: ValueError) -> None:
    text = str(error)
    text.encode()
    require(len(text) < 65_536, f"an error of {len(text)} characters")


def toml(data: bytes) -> None:
    """A configuration file: Settings or ConfigurationError."""
    try:
        settings = load_settings(written("fuzz.toml", data), (), {})
    except ConfigurationError as error:
        _require_printable(error)
        return
    _require_stable(settings)


@cache
def toml_seeds() -> list[bytes]:
    seeds = [path.read_bytes() for path in sorted(EXAMPLES.glob("*.toml"))]
    seeds += [b"[environment]\nname = 'x'\noptions = {a = 2020-01-01, b = [1, 2.5, nan], c = {d = 1}}\n"]
    return [*seeds, b"", b"batch.max_lag = 1\n[run]\nseed = 0x10\n", b"[learner]\nbetas = [0.9, 0.95]\n"]


def overrides(data: bytes) -> None:
    """Arguments of --set, one a line: Settings or ConfigurationError."""
    lines = data.decode(errors="surrogateescape").split("\n")
    try:
        settings = load_settings(None, lines, {})
    except ConfigurationError as error:
        repr(error)
        return
    _require_stable(settings)


@cache
def overrides_seeds() -> list[bytes]:
    return [
        b"batch.max_lag=2",
        b"environment.name=calculator\nenvironment.options.max_operand=30",
        b"environment.options.a.b.c=[1, 2, {x = 1}]",
        b"learner.betas=[0.9, 0.99]\nsampling.temperature=0.7\nrun.directory=runs/x",
        b"security.allow_plaintext=true\nbroker.work_endpoint=tcp://*:1",
        b"rollout.server_args=['--a', \"b\"]\nobjective.adaptive_clip_target=0.15",
        b"run.seed=2020-01-01T00:00:00Z",
    ]


def environment(data: bytes) -> None:
    """Environment variables, NAME=VALUE on each line: Settings or ConfigurationError."""
    lines = (line.partition("=") for line in data.decode(errors="surrogateescape").split("\n"))
    try:
        settings = load_settings(None, (), {f"GSPO_{name}": value for name, _, value in lines})
    except ConfigurationError as error:
        repr(error)
        return
    _require_stable(settings)


@cache
def environment_seeds() -> list[bytes]:
    return [
        b"BATCH__MAX_LAG=2\nRUN__DIRECTORY=runs/x",
        b"ENVIRONMENT__OPTIONS__A__B=1\nDATA_DIR=x\nSECURITY__KEYS=keys",
        b"OBJECTIVE__RATIO_UNIT=token\nOBJECTIVE__EPS_LOW=0.2\nOBJECTIVE__EPS_HIGH=0.27",
    ]


def run_settings(data: bytes) -> None:
    """A run's settings.json: Settings or ConfigurationError."""
    directory = written(SETTINGS_FILE, data).parent
    try:
        settings = read_run_settings(directory)
    except ConfigurationError as error:
        repr(error)
        return
    _require_stable(settings)


@cache
def run_settings_seeds() -> list[bytes]:
    return [Settings().model_dump_json().encode(), b'{"environment": {"options": {"a": [1, null]}}}', b"{}"]


def key(data: bytes) -> None:
    """A key file, secret or public: a key, or KeyFileError. The error never quotes the file."""
    directory = scratch() / "keys"
    directory.mkdir(exist_ok=True)
    (directory / "rollout.secret").write_bytes(data)
    (directory / "rollout.public").write_bytes(data)
    errors: list[ValueError] = []
    try:
        public = list(read_public_keys(directory))
        require(public == [data.strip()], "a public key was read as another")
    except KeyFileError as error:
        errors.append(error)
    try:
        own = Security.load(SecuritySection(keys=str(directory)), "rollout").own
        require(own is not None and own.secret == data.strip() and len(own.public) == 40, "a secret was read as another")
    except ConfigurationError as error:
        errors.append(error)
    said = " ".join(str(error) for error in errors)
    secret = data.decode(errors="replace").strip()
    require(len(secret) < 8 or secret not in said, "an error quotes a key")


@cache
def key_seeds() -> list[bytes]:
    fixed = [
        b"JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6",
        b"rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
        b"#" * 40,
        b"0" * 40,
    ]
    return [*fixed, b"  " + fixed[0] + b"\r\n", fixed[0][:-1]]


def options(data: bytes) -> None:
    """The options of a built-in environment or task set, as JSON [name, options]: one with tasks, or ValueError."""
    try:
        name, given = json.loads(data)
        if not isinstance(given, dict) or name not in (*ENVIRONMENTS, *TASK_SETS):
            return
    except (ValueError, TypeError, RecursionError):
        return
    try:
        made = create_task_set(name, given)
        if name not in ("dataset", "rows"):
            _play(made)
    except ValueError as error:
        repr(error)


def _play(made: TaskSet) -> None:
    for split in ("train", "eval"):
        task = made.tasks(split).task(0)  # type: ignore[arg-type]
        if not isinstance(made, Environment):
            require(msgpack.unpackb(msgpack.packb(task)) == task, "a task changed on the wire")
            continue
        start = made.start(task, 1)
        step = made.step(start.state, "12")
        require(msgpack.unpackb(msgpack.packb(step.state)) == step.state, "a state changed on the wire")
        require(bool(step.messages) != step.done, "an episode neither ends nor continues")


@cache
def options_seeds() -> list[bytes]:
    given: list[tuple[str, dict[str, Any]]] = [
        ("arithmetic", {}),
        ("calculator", {"max_operand": "30", "operators": "+-*", "max_turns": 4, "call_reward": 0.1, "num_eval_tasks": 7}),
        ("calculator", {"bad_call_reward": -1}),
        ("shop", {"num_eval_tasks": "3"}),
        ("rows", {"train_path": "a.jsonl", "on_bad_row": "skip"}),
        ("dataset", {"train_path": "a.jsonl", "answer_marker": "", "on_bad_row": "skip", "reward_deadline_s": "3"}),
    ]
    return [json.dumps(each).encode() for each in given]


def rows(data: bytes) -> None:
    """A .jsonl file, with bad rows refused and with bad rows skipped: rows that fit on the wire, or ValueError."""
    path = written("rows.jsonl", data)
    for on_bad_row in ("error", "skip"):
        _require_tasks(path, on_bad_row)
        options = {"eval_path": str(path), "on_bad_row": on_bad_row}
        try:
            source = create_task_set("dataset", options).tasks("eval")
        except ValueError as error:
            _require_printable(error)
            continue
        for row in (source.task(index) for index in range(source.num_tasks or 0)):
            require(msgpack.unpackb(msgpack.packb(row)) == row, "a row changed on the wire")
            require(bool(str(row["prompt"]).strip()) and bool(str(row["answer"]).strip()), "an empty row")


def _require_tasks(path: Path, on_bad_row: str) -> None:
    """The same file as an agent's tasks."""
    try:
        source = create_task_set("rows", {"train_path": str(path), "on_bad_row": on_bad_row}).tasks("train")
    except ValueError as error:
        _require_printable(error)
        return
    for index in range(source.num_tasks or 0):
        task = source.task(index)
        require(msgpack.unpackb(msgpack.packb(task)) == task, "a task changed on the wire")
        json.dumps(task, allow_nan=False).encode()


@cache
def rows_seeds() -> list[bytes]:
    lines = ({"question": f"{n} + 1?", "answer": f"it is so. #### {n + 1}"} for n in count())
    good = b"\n".join(json.dumps(line).encode() for line in islice(lines, 4))
    return [good, good + b'\n\n{"question": "x", "answer": 5}\n[]', b'{"question": 1.5, "answer": "#### \\u00e9"}\r\n']


def mutate_keys(data: bytes, rng: Random) -> bytes:
    """Replace a character by one of Z85, or change bytes."""
    if not data or rng.random() < 0.3:
        return mutate_bytes(data, rng)
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.choice(b"0aZ.#$@}{%")]) + data[at + 1 :]


TARGETS = (
    Target(name="toml", run=toml, seeds=toml_seeds, mutate=mutate_lines, cases=300_000),
    Target(name="overrides", run=overrides, seeds=overrides_seeds, mutate=mutate_lines, cases=300_000),
    Target(name="environment", run=environment, seeds=environment_seeds, mutate=mutate_lines, cases=200_000),
    Target(name="run_settings", run=run_settings, seeds=run_settings_seeds, mutate=mutate_json, cases=200_000),
    Target(name="key", run=key, seeds=key_seeds, mutate=mutate_keys, cases=200_000, max_bytes=256),
    Target(name="options", run=options, seeds=options_seeds, mutate=mutate_json, cases=300_000),
    Target(name="rows", run=rows, seeds=rows_seeds, mutate=mutate_json_lines, cases=300_000),
)
