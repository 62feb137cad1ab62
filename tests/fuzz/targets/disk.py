"""Targets for the files of a run and of a model, after a disk or a person has changed them."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

from gspo_services.broker.store.reader import LEDGER_FILE, NoLedger, Reader, StoreCorrupt, reading
from gspo_services.cli.doctor.observe import read_ledger
from gspo_services.rollout.tokenizer import ChatTokenizer, TokenizerError
from gspo_services.runs.audit import audit_run
from tests.fuzz.mutate import FRAME_MARK, mutate_bytes, mutate_json
from tests.fuzz.scratch import scratch
from tests.fuzz.target import Target, require
from tests.support.processes.small_run import write_small_run

PLAIN_TYPES: Final = (
    None,
    -1,
    0,
    1,
    2**62,
    0.5,
    "",
    "x",
    "[1]",
    "{}",
    "null",
    "[[1]]",
    '{"line": 1}',
    b"",
    b"\x93\x90\x90\xc0",
)
TABLES: Final = (
    "groups",
    "trajectories",
    "chunks",
    "batches",
    "versions",
    "trained",
    "evaluations",
    "checkpointed",
    "metrics_lines",
    "meta",
    "commits",
    "failures",
    "quarantined",
    "archives",
    "archived",
)


@cache
def _small_run() -> Path:
    directory = scratch() / "small-run"
    write_small_run(directory)
    for suffix in ("-wal", "-shm"):
        require(not (directory / f"{LEDGER_FILE}{suffix}").exists(), "the ledger is still open")
    return directory


@cache
def _ledger_bytes() -> bytes:
    return (_small_run() / LEDGER_FILE).read_bytes()


@cache
def _columns() -> list[tuple[str, str]]:
    with closing(sqlite3.connect(_small_run() / LEDGER_FILE)) as connection:
        return [
            (table, str(row[1])) for table in TABLES for row in connection.execute(f"PRAGMA table_info({table})").fetchall()
        ]


def ledger(data: bytes) -> None:
    """A ledger with changed bytes (first byte even) or values (odd): every reader raises its documented errors only."""
    if not data:
        return
    path = _small_run() / LEDGER_FILE
    path.write_bytes(_ledger_bytes())
    try:
        (_change_values if data[0] % 2 else _change_bytes)(path, data[1:])
        _read_all(path.parent)
    finally:
        for suffix in ("-wal", "-shm", "-journal"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)


def _change_bytes(path: Path, data: bytes) -> None:
    """Each change takes four bytes: three say where, one says what. Three bytes at the end cut the file short."""
    content = bytearray(_ledger_bytes())
    for at in range(0, len(data) - 3, 4):
        content[int.from_bytes(data[at : at + 3], "little") % len(content)] = data[at + 3]
    if len(data) % 4 == 3:
        del content[int.from_bytes(data[-3:], "little") % len(content) :]
    path.write_bytes(content)


def _change_values(path: Path, data: bytes) -> None:
    """Each change takes three bytes: column, value, row."""
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode = MEMORY")
        connection.execute("PRAGMA synchronous = OFF")
        with connection:
            for at in range(0, len(data) - 2, 3):
                table, column = _columns()[data[at] % len(_columns())]
                value = PLAIN_TYPES[data[at + 1] % len(PLAIN_TYPES)]
                _change(connection, table, column, value, data[at + 2])
    finally:
        connection.close()


def _change(connection: sqlite3.Connection, table: str, column: str, value: Any, row: int) -> None:
    key = {"meta": "key", "trained": "batch"}.get(table, "rowid")
    number = row % 16
    which = f"{key} IN (SELECT {key} FROM {table} ORDER BY {key} LIMIT 1 OFFSET {number})"
    try:
        if row >= 240:
            connection.execute(f"DELETE FROM {table} WHERE {which}")
        else:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE {which}", (value,))
    except sqlite3.IntegrityError:
        return  # no writer could have stored this either


def _read_all(directory: Path) -> None:
    try:
        audit = audit_run(directory)
        json.dumps(audit.as_plain())
    except NoLedger:
        audit = None
    with suppress(NoLedger, StoreCorrupt, sqlite3.OperationalError):
        read_ledger(directory)
    try:
        whole = _read_batches(directory)
    except (NoLedger, StoreCorrupt, sqlite3.DatabaseError):
        return
    pristine = _pristine()
    if audit is not None and audit.clean:
        require(whole == pristine, "the audit is clean, but the batches changed")


def _read_batches(directory: Path) -> list[Any]:
    with reading(directory) as connection:
        reader = Reader(directory / LEDGER_FILE, connection)
        reader.contents()
        reader.elapsed_s()
        reader.metrics_after(0)
        (number,) = connection.execute("SELECT count(*) FROM batches").fetchone()
        found = []
        for index in range(min(number, 8)):
            for row, payload in reader.batch(index)[1]:
                found.append((index, row.trajectory_id, payload.token_ids.tobytes(), payload.logprobs.tobytes()))
        return found


@cache
def _pristine() -> list[Any]:
    path = _small_run() / LEDGER_FILE
    now = path.read_bytes()
    path.write_bytes(_ledger_bytes())
    try:
        return _read_batches(_small_run())
    finally:
        path.write_bytes(now)


@cache
def ledger_seeds() -> list[bytes]:
    rng = Random(0)
    columns = [b"\1" + bytes([number, value, 0]) for number in range(len(_columns())) for value in (0, 3, 6, 7)]
    return [b"\0", *rng.sample(columns, 30), *(b"\0" + rng.randbytes(4 * each) for each in (1, 2, 8, 30))]


def checkpoint(data: bytes) -> None:
    """checkpoint.json, ``latest``, ``last-version`` and a rank's random state: read, or CheckpointError."""
    from gspo_services.learner.checkpoints.format import (
        CheckpointError,
        load_checkpoint,
        read_metadata,
    )
    from tests.support.learner.checkpoints import find_latest, newest_given

    root = scratch() / "checkpoints"
    metadata, latest, version, random_state = (*data.split(FRAME_MARK), b"", b"", b"")[:4]
    path = root / NAME
    path.mkdir(parents=True, exist_ok=True)
    (path / "checkpoint.json").write_bytes(metadata)
    (path / "random-00000.json").write_bytes(random_state)
    (root / "latest").write_bytes(latest)
    (root / "last-version").write_bytes(version)
    for read in (find_latest, newest_given):
        try:
            found = read(root)
            require(not isinstance(found, int) or found >= 0, f"version {found} was given")
            require(not isinstance(found, Path) or found.parent == root, f"the newest checkpoint is {found}")
        except CheckpointError as error:
            repr(error)
    with _random_states_kept():
        try:
            read_metadata(path)
            state = load_checkpoint(_Engine(), path)  # type: ignore[arg-type]
            require(state.policy_version >= 0 and state.batch_position >= 0, f"a checkpoint at {state}")
        except CheckpointError as error:
            repr(error)


NAME: Final = "version-0000000003-batch-0000000002"


class _Engine:
    """A learner's engine that accepts any state."""

    rank = 0
    world_size = 1

    def layout(self) -> dict[str, Any]:
        return {"num_ranks": 1}

    def weights_digest(self) -> str:
        return "ab"

    def load_state(self, directory: Path) -> None:
        """There is no state to load."""


@contextmanager
def _random_states_kept() -> Iterator[None]:
    import random

    import numpy as np
    import torch

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@cache
def checkpoint_seeds() -> list[bytes]:
    from gspo_services.learner.checkpoints.digests import text_digest
    from gspo_services.learner.checkpoints.format import random_state as present_random_state

    def signed(metadata: dict[str, Any]) -> bytes:
        return json.dumps(metadata | {"digest": text_digest(json.dumps(metadata, sort_keys=True))}).encode()

    state = {"policy_version": 3, "batch_position": 2, "mismatch": {"sum": 0.5}, "adaptive_clip": {}, "calibration": {}}
    metadata = {"format": 1, "state": state, "layout": {"num_ranks": 1}, "weights_digest": "ab", "files": {}}
    random_state = json.dumps(present_random_state()).encode()
    parts = (signed(metadata), NAME.encode() + b"\n", b"17\n", random_state)
    of_random = {"num_bytes": len(random_state), "digest": text_digest(random_state.decode())}
    whole = (signed({**metadata, "files": {"random-00000.json": of_random}}), *parts[1:])
    others = {"checkpoint.json": {"num_bytes": 3, "digest": ""}, "../latest": {"num_bytes": 1, "digest": ""}}
    with_files = signed({**metadata, "files": others})
    return [
        FRAME_MARK.join(parts),
        FRAME_MARK.join(whole),
        FRAME_MARK.join((with_files, b"../..", b"-1", b"{}")),
        FRAME_MARK.join(parts[:1]),
    ]


def mutate_checkpoint(data: bytes, rng: Random) -> bytes:
    """Change one of the files."""
    parts = data.split(FRAME_MARK)
    at = rng.randrange(len(parts))
    parts[at] = mutate_json(parts[at], rng)
    return FRAME_MARK.join(parts)


def learner_state(data: bytes) -> None:
    """A checkpoint's tensors, step count and test log-probs: read, or CheckpointError."""
    from gspo_services.learner.checkpoints.canary import require_canary
    from gspo_services.learner.checkpoints.format import CheckpointError
    from gspo_services.learner.checkpoints.state_files import TensorDirectory, read_steps

    directory = scratch() / "learner-state"
    directory.mkdir(exist_ok=True)
    tensors, steps, canary = (*data.split(FRAME_MARK), b"", b"")[:3]
    (directory / "slab.0-of-1.safetensors").write_bytes(tensors)
    (directory / "state.json").write_bytes(steps)
    (directory / "canary.json").write_bytes(canary)
    try:
        found = TensorDirectory(directory).read("slab/weight", 1, 2, (2, 3))
        require(tuple(found.shape) == (2, 3), f"a tensor of shape {list(found.shape)}")
    except CheckpointError as error:
        repr(error)
    try:
        require(read_steps(directory) >= 0, "a negative number of optimizer steps")
        require_canary(directory, [-1.0, -2.0], "float32")
    except CheckpointError as error:
        repr(error)


@cache
def learner_state_seeds() -> list[bytes]:
    import torch
    from safetensors.torch import save

    steps, canary = b'{"optimizer_steps":7}', b'{"logprobs":[-1.0,-2.0]}'
    tensors = [
        save({"slab/weight": content}, metadata={"first_row": first_row})
        for content, first_row in ((torch.ones(4, 3), "0"), (torch.ones(2, 3), "1"), (torch.tensor(1.0), "0"))
    ]
    return [FRAME_MARK.join((each, steps, canary)) for each in tensors]


def tokenizer(data: bytes) -> None:
    """A model's tokenizer_config.json, config.json and generation_config.json: a tokenizer or TokenizerError."""
    parts = (*data.split(FRAME_MARK), b"{}", b"{}")
    directory = _tokenizer_directory()
    for name, content in zip(TOKENIZER_FILES, parts, strict=False):
        (directory / name).write_bytes(content)
    try:
        made = ChatTokenizer(directory)
        ids = made.prompt_ids([{"role": "user", "content": "12+3"}])
    except TokenizerError as error:
        repr(error)
        return
    require(all(0 <= each < made.vocab_size for each in ids), "ids are outside of the vocabulary")
    require(all(each >= 0 for each in made.stop_ids), f"stop ids {made.stop_ids}")
    made.action_text(ids)


TOKENIZER_FILES: Final = ("tokenizer_config.json", "config.json", "generation_config.json")
TEMPLATE: Final = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@cache
def _tokenizer_directory() -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    directory = scratch() / "tokenizer"
    directory.mkdir(exist_ok=True)
    letters = {letter: number for number, letter in enumerate("<abcdefghijklmnopqrstuvwxyz 0123456789+:\n>")}
    made = Tokenizer(WordLevel({**letters, "?": 50}, unk_token="?"))
    made.pre_tokenizer = Split("", "isolated")
    made.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@cache
def tokenizer_seeds() -> list[bytes]:
    config = {"eos_token": "<", "pad_token": {"content": ">"}, "chat_template": TEMPLATE}
    return [
        FRAME_MARK.join(
            json.dumps(each).encode() for each in (config, {"vocab_size": 64, "eos_token_id": 1}, {"eos_token_id": [2, 3]})
        ),
        FRAME_MARK.join(
            json.dumps(each).encode() for each in ({"eos_token": None}, {"vocab_size": 64}, {"eos_token_id": 5})
        ),
    ]


TARGETS = (
    Target(name="ledger", run=ledger, seeds=ledger_seeds, mutate=mutate_bytes, cases=60_000, max_bytes=256),
    Target(
        name="checkpoint", run=checkpoint, seeds=checkpoint_seeds, mutate=mutate_checkpoint, cases=100_000, max_bytes=16_384
    ),
    Target(name="learner_state", run=learner_state, seeds=learner_state_seeds, mutate=mutate_bytes, cases=150_000),
    Target(name="tokenizer", run=tokenizer, seeds=tokenizer_seeds, mutate=mutate_checkpoint, cases=150_000),
)
