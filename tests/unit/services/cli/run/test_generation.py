"""`gspo generate` is a run without training: its settings and processes follow from the run's."""

from pathlib import Path

import pytest

from gspo_services.cli.run.generation import generation_settings, generation_specs
from gspo_services.cli.run.processes import process_specs
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings.configuration import load_settings
from tests.support.cli.typed import gspo
from tests.support.processes.run_process import REPOSITORY

CONFIG = REPOSITORY / "examples/arithmetic.toml"


def test_all_generated_groups_may_be_of_one_version(tmp_path: Path) -> None:
    settings, own = generation_settings(CONFIG, ["batch.groups_per_batch=8"], tmp_path, 17)
    # Three batches of eight; admission lets in (max_lag + 1) batches of groups of one version.
    assert (settings.run.num_batches, settings.batch.max_lag) == (3, 2)
    assert (settings.run.directory, settings.evaluation.every_batches) == (tmp_path, 0)
    assert load_settings(CONFIG, ["batch.groups_per_batch=8", *own]) == settings
    one, _ = generation_settings(CONFIG, ["batch.groups_per_batch=8"], tmp_path, 8)
    assert (one.run.num_batches, one.batch.max_lag) == (1, 0)


@pytest.mark.parametrize("several", [[], ['lora.adapters=["a", "b"]', "lora.adapter_field=generator"]])
def test_generating_publishes_the_model_and_no_adapter(several: list[str], tmp_path: Path) -> None:
    overrides = ["lora.rank=8", "lora.publish=adapter", *several]
    settings, own = generation_settings(CONFIG, overrides, tmp_path, 8)
    assert (settings.lora.publish, settings.lora.adapters, settings.lora.adapter_field) == ("merged", [], "")
    assert load_settings(CONFIG, [*overrides, *own]) == settings


def test_no_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--groups is 0: use at least 1"):
        generation_settings(CONFIG, [], tmp_path, 0)


def test_the_publisher_of_the_starting_weights_takes_the_learners_place_and_no_other() -> None:
    settings = load_settings(CONFIG)
    run, generating = process_specs(settings, ["x"]), generation_specs(settings, ["x"])
    assert [spec.name for spec in generating] == ["broker", "weights", "rollout-0", "rollout-1"]
    assert [spec.module for spec in generating][1] == "gspo_services.learner.starting_weights"
    assert [spec.stop_order for spec in generating] == [spec.stop_order for spec in run]
    assert [spec for spec in generating if spec.name != "weights"] == [spec for spec in run if spec.name != "learner"]


@pytest.mark.parametrize("words", [["--generate", "{out}"], ["--generate={out}"]])
def test_a_rollout_that_generates_is_the_command(words: list[str], tmp_path: Path) -> None:
    given = [word.format(out=tmp_path / "out") for word in words]
    done = gspo("rollout", str(CONFIG), *given, "--groups", "8", "--set", f"model.path={tmp_path}/none")
    assert done.returncode == 2
    assert done.stderr.startswith("gspo generate: model.path is ")
