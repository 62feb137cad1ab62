"""What each process says that it opens, beside what it then opens."""

from pathlib import Path
from typing import Final

import pytest

from gspo_services.broker.entry import tasks_of
from gspo_services.broker.evaluation_sets import open_sets
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings, called_addresses, load_settings, opened_paths
from gspo_services.tasks.environments import create_environment

DATASETS: Final = {
    "two splits": '[environment]\nname = "dataset"\noptions = { train_path = "AT/a.jsonl", eval_path = "AT/b.jsonl" }',
    "no evaluation": '[environment]\nname = "dataset"\noptions = { train_path = "AT/a.jsonl", eval_path = "AT/none" }\n'
    "[evaluation]\nevery_batches = 0",
    "sources": '[environment]\nname = "dataset"\n'
    'options = { sources = [{ path = "AT/a.jsonl" }, { path = "AT/b.jsonl" }], eval_path = "AT/c.jsonl" }',
    "sets": '[environment]\nname = "dataset"\noptions = { train_path = "AT/a.jsonl", eval_path = "AT/none.jsonl" }\n'
    '[evaluation.sets.easy.options]\neval_path = "AT/b.jsonl"\n[evaluation.sets.seen]\nsplit = "train"\n'
    '[evaluation.sets.late]\nevery_batches = 0\noptions = { eval_path = "AT/none.jsonl" }',
}


def settings_of(tmp_path: Path, text: str, *overrides: str) -> Settings:
    path = tmp_path / "run.toml"
    path.write_text(text.replace("AT", str(tmp_path / "data")))
    return load_settings(path, overrides, environment={})


def row_of(path: str) -> str:
    return f'{{"question": "{Path(path).name}", "answer": "#### 2"}}\n'


def read_all(settings: Settings) -> None:
    """Read all tasks, as a broker does at its start."""
    tasks_of(settings)
    open_sets(settings)


def data_of(settings: Settings) -> set[str]:
    return {each.path for each in opened_paths(settings, "broker") if "options" in each.setting}


@pytest.mark.parametrize("name", DATASETS)
def test_a_broker_opens_the_data_that_it_names_and_needs_each_of_them(name: str, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, DATASETS[name])
    named = data_of(settings)
    (tmp_path / "data").mkdir()
    for path in named:
        Path(path).write_text(row_of(path))
    read_all(settings)
    for path in named:
        Path(path).unlink()
        with pytest.raises(ConfigurationError, match=Path(path).name):
            read_all(settings)
        Path(path).write_text(row_of(path))
    assert len(named) == {"two splits": 2, "no evaluation": 1, "sources": 3, "sets": 2}[name]


def test_a_rollout_opens_the_model_and_no_tasks(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, DATASETS["sets"], "security.keys=/etc/keys", "reward.model=/models/judge")
    named = {each.setting: each for each in opened_paths(settings, "rollout") if each.setting}
    assert set(named) == {"run.directory", "security.keys", "model.path", "rollout.weights_directory", "reward.model"}
    assert named["security.keys"].files == ("rollout*.secret", "broker*.public", "learner*.public")
    create_environment(settings.environment.name, settings.environment.options)  # there is no file


def test_a_node_of_the_learner_beside_the_first_has_no_broker_and_the_same_keys(tmp_path: Path) -> None:
    given = (
        "learner.num_nodes=2", "learner.rendezvous_address=learner-0:29500", "security.keys=/etc/keys",
        "learner.weights_endpoint=tcp://0.0.0.0:7003", "learner.advertised_weights_endpoint=tcp://learner-0:7003",
    )  # fmt: skip
    first, second = (settings_of(tmp_path, "", *given, f"learner.node_rank={number}") for number in (0, 1))
    calls = [[(each.setting, each.process) for each in called_addresses(node, "learner")] for node in (first, second)]
    met = ("learner.rendezvous_address", "learner")
    assert calls == [[("broker.batch_endpoint", "broker"), met], [met]]
    for node in (first, second):
        (keys,) = (each for each in opened_paths(node, "learner") if each.setting == "security.keys")
        assert keys.files == ("learner.secret", "broker*.public", "rollout*.public", "learner.public")


def test_a_rollout_calls_the_broker_and_the_services_that_are_named(tmp_path: Path) -> None:
    given = ("broker.work_endpoint=tcp://broker-0:7001,tcp://broker-1:7001", 'sandbox.urls=["http://box:7010"]')
    text = '[environment]\nname = "dataset"\noptions = { reward_url = "http://judge:80/" }'
    more = (*given, "security.allow_plaintext=true")
    settings = settings_of(tmp_path, text, *more, "learner.advertised_weights_endpoint=tcp://learner-0.learner:7003")
    assert [(each.address, each.process) for each in called_addresses(settings, "rollout")] == [
        ("tcp://broker-0:7001,tcp://broker-1:7001", "broker"),
        ("tcp://learner-0.learner:7003", "learner"),
        ("http://judge:80/", None),
        ("http://box:7010", None),
    ]
