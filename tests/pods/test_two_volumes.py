"""A run on a user's own reward and rows is stopped and backed up, loses its broker's volume, is restored, goes on, and is
exported, with the commands of docs/guide/kubernetes.md. Minutes; ``make test-pods``.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.deploy.cluster import K8S, Cluster, render
from tests.deploy.conftest import copy_manifests
from tests.deploy.kustomizations import FILE
from tests.pods.kubectl import Kubectl, commands_of
from tests.pods.node import Node
from tests.pods.run import audited, events, rows, run_directory, until

pytestmark = [pytest.mark.pods, pytest.mark.timeout(1500)]
START_S: Final = 400.0
REWARD: Final = """\
def grade(completion: str, task: dict) -> dict[str, float]:
    return {"right": float(completion.strip() == task["answer"]), "of_mine": 1.0}
"""
OWN: Final = {
    "components": [f"../../components/{name}" for name in ("keys", "code", "data", "tools")],
    "configMapGenerator": [
        {"name": "gspo-run", "behavior": "replace", "files": ["run.toml"]},
        {"name": "gspo-code", "files": ["my_reward.py"]},
        {"name": "gspo-data", "files": ["data/train.jsonl", "data/eval.jsonl"]},
    ],
}
CHANGES: Final = {
    'name = "arithmetic"': """name = "dataset"
[environment.options]
train_path = "/etc/gspo/data/train.jsonl"
eval_path = "/etc/gspo/data/eval.jsonl"
prompt_column = "question"
answer_column = "answer"
reward = "my_reward:grade"
reward_weights = { right = 1.0, of_mine = 0.5 }
system_prompt = \"\"""",
    "groups_per_batch = 32": "groups_per_batch = 8",
    "every_batches = 5\nnum_tasks = 128": "every_batches = 50\nnum_tasks = 8",
    "checkpoint_every_batches = 5": "checkpoint_every_batches = 2",
    "allow_plaintext = true": 'keys = "/etc/gspo/keys"',
}


@pytest.fixture
def mine(tmp_path: Path) -> Cluster:
    """The overlay ``cpu`` with the user's own ConfigMaps, keys and tools."""
    overlay = copy_manifests(tmp_path / "manifests") / "overlays" / "cpu"
    (overlay / "data").mkdir()
    (overlay / FILE).write_text(yaml.safe_dump(yaml.safe_load((overlay / FILE).read_text()) | OWN))
    (overlay / "my_reward.py").write_text(REWARD)
    for split, first in (("train", range(40)), ("eval", range(40, 50))):
        pairs = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in first for b in (3, 7)]
        (overlay / "data" / f"{split}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    text = (K8S / "base" / "run.toml").read_text()
    for old, new in CHANGES.items():
        assert old in text, old
        text = text.replace(old, new)
    (overlay / "run.toml").write_text(text)
    return Cluster(render(overlay))


def test_a_run_outlives_its_brokers_volume_by_the_commands_of_the_guide(
    start_node: Callable[[Cluster], Node], mine: Cluster, tmp_path: Path
) -> None:
    written = commands_of("Backup and restore")
    assert list(written) == ["", "Stop", "Back up", "Lost volume", "Restore", "Resume", "Export"]
    with start_node(mine) as node:
        kubectl = Kubectl(node, mine, tmp_path / "manifests")
        for line in written[""]:
            kubectl(line)
        node.apply(rollouts=1)
        until(node, "third batch", lambda: len(rows(node, "batch")) >= 3, START_S)
        stop, *scale_down = written["Stop"]
        kubectl(stop)
        learner = node.pods["learner-0"]
        until(node, "the learner's end of the run", lambda: bool(events(learner, "run_complete")), START_S)
        for line in (*scale_down, *written["Back up"]):
            kubectl(line)
        before = audited(node)
        assert before.problems == []

        for line in (*written["Lost volume"], *scale_down, *written["Restore"]):
            kubectl(line)
        again = audited(node)
        assert (again.problems, again.num_batches) == ([], before.num_batches)

        for line in written["Resume"]:
            kubectl(line)
        until(node, "batches after the restore", lambda: len(rows(node, "batch")) >= before.num_batches + 2, START_S)
        (resumed,) = events(node.pods["learner-0"], "resumed")
        assert resumed["next_batch"] == before.num_batches
        for line in scale_down:
            kubectl(line)
        export, fetch = written["Export"]
        kubectl(export)
        assert "export/config.json" in kubectl(fetch.replace("tar -cC", "ls -d").replace(" export", "/export/config.json"))
        report = audited(node)
        assert report.problems == []
        assert report.num_batches >= before.num_batches + 2
        (component,) = {row["train/reward/of_mine"] for row in rows(node, "batch")}
        assert component == 1.0
        assert (run_directory(node) / "checkpoints").is_symlink()
