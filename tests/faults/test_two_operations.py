"""Every two operations on one run at once: the first stands amid its copying, as on a slow disk, while each of the others
runs to its end. Both are right; of two that want the same place, the second says who has it."""

import filecmp
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gspo_services.broker.refresh import INCOMING
from gspo_services.runs.audit import audit_run
from gspo_services.runs.backup.backup import back_up
from gspo_services.runs.backup.manifest import list_backups
from gspo_services.runs.backup.restore import restore
from gspo_services.shared.runtime.operations import PREFIX
from gspo_services.shared.settings import override_settings, read_run_settings
from gspo_services.shared.settings.run_settings import write_run_settings
from tests.support.broker.archiving import Archiving, archived
from tests.support.engines.chat_models import TINY_TEMPLATE
from tests.support.files.written import written
from tests.support.processes.small_run import write_small_run
from tests.support.processes.standing import MAIN, standing
from tests.support.runs.backups import nothing

pytestmark = pytest.mark.faults
PATIENCE_S = 400.0
VOCABULARY = 20_000
"""More than the small run has token ids."""
REPLAY = "gspo_services.runs.replay.__main__"
EVAL = "gspo_services.runs.eval.command"
EXPORT = "gspo_services.runs.export.__main__"


@dataclass(frozen=True)
class Operation:
    """One operation on RUN, whose result is OUT."""

    words: tuple[str, ...]
    place: str
    """Amid its work."""
    is_right: Callable[[Path], bool]
    number: int = 1
    module: str = ""
    """Its own process."""

    def of(self, run: Path, out: Path) -> list[str]:
        known = {"RUN": str(run), "OUT": str(out), "BACKUPS": str(run.with_name("backups")), "FILE": f"{out}.jsonl"}
        return [known.get(word, word) for word in self.words]

    def done(self, run: Path, out: Path) -> tuple[int, str]:
        """Do it, in another process. Returns its status and what it said."""
        if self.words[0] == "data" and not Path(f"{out}.jsonl").exists():
            written(Path(f"{out}.jsonl"), *range(100, 109))
        command = [sys.executable, "-P", "-m", self.module or "gspo_services.cli.main", *self.of(run, out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        return done.returncode, done.stdout + done.stderr


def is_whole_backup(out: Path) -> bool:
    ((path, manifest),) = list_backups(out)
    again = out.with_name(f"{out.name}-again")
    restore(path, again, None, nothing)
    checkpoints = {name.split("/")[1] for name in manifest.files if name.startswith("checkpoints/version")}
    return len(checkpoints) == len(manifest.positions) and audit_run(again).clean


def is_whole_model(out: Path) -> bool:
    from safetensors.torch import load_file

    return sum(tensor.numel() for tensor in load_file(out / "model.safetensors").values()) > VOCABULARY * 64


def is_handed_in(out: Path) -> bool:
    incoming = out.parents[1] / "run" / INCOMING / f"{out.name}.jsonl"
    return filecmp.cmp(incoming, f"{out}.jsonl", shallow=False)


OPERATIONS = {
    "backup": Operation(("backup", "RUN", "OUT"), "gspo_services.runs.backup.backup:copy_and_digest", is_whole_backup, 2),
    "restore": Operation(
        ("restore", "BACKUPS", "OUT"),
        "gspo_services.shared.runtime.foreign:ForeignTree.copy",
        lambda out: audit_run(out).clean,
        3,
    ),
    "export": Operation(
        ("RUN", "--to", "OUT"), "gspo_services.runs.export.writer:write_model", is_whole_model, module=EXPORT
    ),
    "replay": Operation(
        ("RUN", "--out", "OUT", "--batches", "1", "--set", "learner.learning_rate=1e-4"),
        f"{REPLAY}:_prepare",
        lambda out: (out / "replay.json").is_file() and is_whole_model(out / "export"),
        module=REPLAY,
    ),
    "data": Operation(
        ("data", "add", "RUN", "FILE", "--wait", "0"), "gspo_services.cli.data:_hand_in", is_handed_in
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that can be archived, exported, replayed, added to."""
    from transformers import Qwen3MoeForCausalLM

    from tests.support.learner.tiny_model import save_tiny_model
    from tests.support.runs.model_checkpoints import write_model_checkpoint

    place = tmp_path_factory.mktemp("operations")
    write_small_run(place / "run")
    config = save_tiny_model(place / "model").config
    config.vocab_size = VOCABULARY
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(place / "model")
    (place / "model" / "chat_template.jinja").write_text(TINY_TEMPLATE)
    shutil.rmtree(place / "run" / "checkpoints")
    write_model_checkpoint(place / "run", model, 0, 1)  # Of batches that were trained again: the ledger knows no digest.
    train = written(place / "train.jsonl", 0, 1, 2, 3)
    changes = [
        f"model.path={place / 'model'}",
        "environment.name=dataset",
        f'environment.options={{train_path = "{train}", eval_path = "{train}"}}',
    ]
    write_run_settings(override_settings(read_run_settings(place / "run"), changes))
    return place / "run"


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    made = Path(shutil.copytree(original, tmp_path / "run"))
    back_up(made, tmp_path / "backups", nothing)
    (tmp_path / "out").mkdir()
    return made


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Let the command that stands go on to its end."""
    _, said = process.communicate(timeout=PATIENCE_S)
    return process.returncode, said


@pytest.mark.parametrize("first", OPERATIONS)
def test_while_one_stands_amid_its_work_every_other_is_done_and_both_are_right(first: str, run: Path) -> None:
    operation, out = OPERATIONS[first], run.with_name("out")
    if first == "data":
        written(out / "first.jsonl", 1000, 1001)
    entry = f"{operation.module}:main" if operation.module else MAIN
    with standing(operation.place, operation.number, *operation.of(run, out / "first"), entry=entry) as process:
        for second, other in OPERATIONS.items():
            status, said = other.done(run, out / second)
            assert status == 0, said
            assert other.is_right(out / second), second
        Archiving(run, keep_batches=0).until(lambda: True)
        Archiving(run).until(lambda: bool(archived(run)))
        assert finish(process)[0] == 0
    assert operation.is_right(out / "first")
    assert audit_run(run).clean
    assert not [*run.rglob(f"{PREFIX}*"), *run.glob(".backup-*"), *out.glob(f"{PREFIX}*")]


@pytest.mark.parametrize("first", OPERATIONS)
def test_the_second_at_the_same_place_says_who_has_it_and_the_first_is_right(first: str, run: Path) -> None:
    operation, out = OPERATIONS[first], run.with_name("out") / "first"
    others = [each for each in OPERATIONS if each != "data"] if first in ("restore", "export", "replay") else [first]
    if first == "data":
        written(out.with_name("first.jsonl"), 1000, 1001)
    entry = f"{operation.module}:main" if operation.module else MAIN
    with standing(operation.place, operation.number, *operation.of(run, out), entry=entry) as process:
        for second in [each for each in others if each != "backup" or first == "backup"]:
            status, said = OPERATIONS[second].done(run, out)
            assert status == 1, said
            assert f"another `gspo {' '.join(operation.words[:1]) if not operation.module else first}" in said, said
            assert f"(process {process.pid}) since 20" in said, said
        assert finish(process)[0] == 0
    assert operation.is_right(out)


@pytest.mark.parametrize("first", OPERATIONS)
def test_after_a_kill_the_same_operation_is_done_and_nothing_is_left(first: str, run: Path) -> None:
    operation, out = OPERATIONS[first], run.with_name("out") / "first"
    if first == "data":
        written(out.with_name("first.jsonl"), 1000, 1001)
    entry = f"{operation.module}:main" if operation.module else MAIN
    with standing(operation.place, operation.number, *operation.of(run, out), entry=entry) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
    if first == "data":
        shutil.rmtree(run / INCOMING)  # It was handed in already.
    if first == "replay":
        shutil.rmtree(out, ignore_errors=True)
    status, said = operation.done(run, out)
    assert status == 0, said
    assert operation.is_right(out)
    assert not [*run.glob(f"{PREFIX}backup*"), *run.glob(".backup-*"), *out.parent.glob(f"{PREFIX}*")]


def test_an_eval_of_a_live_run_owns_its_results_and_hinders_nobody(run: Path) -> None:
    out = run.with_name("out")
    tasks = written(out / "tasks.jsonl", 1, 2)
    config = out / "eval.toml"
    config.write_text(
        f'[model]\npath = "{read_run_settings(run).model.path}"\n[run]\ndirectory = "{run}"\n[environment]\n'
        f'name = "dataset"\noptions = {{ train_path = "{tasks}", eval_path = "{tasks}" }}\n'
    )
    words = (str(config), "--checkpoint", "1", "--out", str(out / "results"))
    with standing(f"{EVAL}:missing", 1, *words, entry=f"{EVAL}:main") as process:
        for second in ("backup", "export", "data"):
            status, said = OPERATIONS[second].done(run, out / second)
            assert status == 0, said
            assert OPERATIONS[second].is_right(out / second), second
        command = [sys.executable, "-P", "-m", EVAL, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 1
        assert "another `gspo eval` of " in done.stderr
        assert f"(process {process.pid}) since 20" in done.stderr
    # It was killed: the next one has its results, and its files.
    with standing(f"{EVAL}:missing", 1, *words, entry=f"{EVAL}:main"):
        assert len([*out.glob(f"{PREFIX}*"), *run.glob(f"{PREFIX}eval*")]) == 2
