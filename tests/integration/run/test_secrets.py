"""Secrets planted wherever a user may put one: none is in anything that a run leaves behind."""

import io
import json
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard

from gspo_services.cli.main import main
from gspo_services.runs.export.card import _toml
from gspo_services.runs.track.provenance import flat_settings
from gspo_services.shared.settings import read_run_settings, run_fingerprint
from gspo_services.shared.settings.configuration import load_settings
from gspo_services.tasks.json_rewards.client import UnansweredError
from tests.support.broker.process import BrokerProcess
from tests.support.processes.small_run import write_small_run

WHERE = (
    "PGPASSWORD", "WANDB_API_KEY", "OPENAI_API_KEY", "GSPO_SANDBOX_KEY", "HF_TOKEN", "agent_url", "agent_query",
    "agent_variable", "option_api_key", "option_deep_password", "advertised",
)  # fmt: skip
CANARIES = {name: f"canary-{number:02}-of-{name.replace('_', '')}" for number, name in enumerate(WHERE)}
MAGIC = b"\x28\xb5\x2f\xfd"


def settings_with_secrets() -> dict[str, dict[str, object]]:
    told = CANARIES
    return {
        "agent": {
            "url": f"http://me:{told['agent_url']}@127.0.0.1:9/solve?api_key={told['agent_query']}",
            "advertised_url": f"http://me:{told['advertised']}@127.0.0.1:9/v1",
        },
        "agent.environment": {"SEARCH": told["agent_variable"]},
        "environment": {"name": "tests.support.secret_tasks:SecretTasks"},
        "environment.options": {"api_key": told["option_api_key"]},
        "environment.options.deep": {"password": told["option_deep_password"]},
    }


def contents(path: Path) -> Iterator[bytes]:
    """The bytes of a file, and what is compressed in it, wherever that begins."""
    raw = path.read_bytes()
    yield raw
    at = raw.find(MAGIC)
    while at >= 0:
        with suppress(zstandard.ZstdError):
            yield zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw[at:])).read()
        at = raw.find(MAGIC, at + 1)
    for start in (b"\x1f\x8b", b"x\x9c", b"x\x01"):
        at = raw.find(start)
        while at >= 0 and len(raw) < 1 << 20:
            with suppress(zlib.error):
                yield zlib.decompressobj(wbits=47).decompress(raw[at:])
            at = raw.find(start, at + 1)


def leaks(*places: Path | str) -> set[str]:
    found = set()
    for place in places:
        files = [path for path in sorted(place.rglob("*")) if path.is_file()] if isinstance(place, Path) else []
        for name, canary in CANARIES.items():
            if isinstance(place, str) and canary in place:
                found.add(f"{name} in {place[:40]}")
        for path in files:
            for content in contents(path):
                found |= {f"{name} in {path}" for name, canary in CANARIES.items() if canary.encode() in content}
    return found


def test_the_search_finds_what_is_compressed(tmp_path: Path) -> None:
    for name, canary in zip(("a", "b"), ("agent_url", "HF_TOKEN"), strict=True):
        packed = zstandard.compress(CANARIES[canary].encode()) if name == "a" else zlib.compress(CANARIES[canary].encode())
        (tmp_path / name).write_bytes(b"before" + packed)
    assert leaks(tmp_path) == {f"agent_url in {tmp_path / 'a'}", f"HF_TOKEN in {tmp_path / 'b'}"}


async def test_no_secret_is_in_what_a_run_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGPASSWORD", "WANDB_API_KEY", "OPENAI_API_KEY", "GSPO_SANDBOX_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, CANARIES[name])
    broker = BrokerProcess(tmp_path, settings_with_secrets())
    await broker.start()
    await broker.terminate()
    run, settings = broker.run_directory, load_settings(broker.config)
    again = read_run_settings(run)
    assert run_fingerprint(again) == run_fingerprint(settings), "commands that read settings.json know the run"
    assert leaks(run, json.dumps(broker.events), _toml(settings), json.dumps(flat_settings(settings))) == set()


def test_no_secret_is_in_a_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGPASSWORD", "WANDB_API_KEY"):
        monkeypatch.setenv(name, CANARIES[name])
    write_small_run(tmp_path / "run")
    keys = tmp_path / "keys"
    assert main(["keys", str(keys)]) == 0
    shutil.move(keys, tmp_path / "run" / "keys")
    assert main(["backup", str(tmp_path / "run"), str(tmp_path / "backup")]) == 0
    secrets = [path.read_bytes().strip() for path in (tmp_path / "run" / "keys").glob("*.secret")]
    kept = [content for path in (tmp_path / "backup").rglob("*") if path.is_file() for content in contents(path)]
    assert len(secrets) == 4
    assert not [secret for secret in secrets for content in kept if secret in content]
    assert leaks(tmp_path / "backup") == set()


def test_an_error_about_a_service_does_not_show_its_password() -> None:
    url = settings_with_secrets()["agent"]["url"]
    assert str(UnansweredError("unreachable", f"{url} is away")) == "http://127.0.0.1:9/solve?api_key=hidden is away"
