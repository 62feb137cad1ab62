"""The sets of a run, from its configuration."""

from pathlib import Path

import pytest

from gspo_services.broker.evaluation_sets import open_sets
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import Settings, load_settings


def loaded(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "my.toml"
    path.write_text(text)
    return load_settings(path, (), {})


def test_each_set_that_a_run_evaluates_has_its_terms(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path,
        """
        [evaluation]
        every_batches = 5
        best_by = "many/pass@4"
        [evaluation.sets.few]
        num_tasks = 3
        every_batches = 20
        [evaluation.sets.many]
        samples = 4
        metrics = ["pass@4", "maj@4"]
        solved_at = 0.5
        max_tokens = 500
        [evaluation.sets.by_hand]
        every_batches = 0
        """,
    )
    tasks, (few, many) = open_sets(settings)
    assert sorted(tasks) == ["eval/few", "eval/many"]
    assert (few.name, few.every_batches, few.num_tasks, few.samples, few.metrics, few.best_by) == (
        "few", 20, 3, 1, ("reward", "avg@1"), "",
    )  # fmt: skip
    # A run records no answers: maj@k is for gspo eval.
    assert (many.num_tasks, many.metrics, many.best_by, many.solved_at) == (256, ("reward", "pass@4"), "pass@4", 0.5)
    assert many.every_batches == 5
    assert few.sampling is None
    assert many.sampling is not None
    assert many.sampling.max_tokens == 500


def test_without_a_word_the_first_set_decides_by_its_reward(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "[evaluation.sets.b]\n[evaluation.sets.a]\n")
    assert [(each.name, each.best_by) for each in open_sets(settings)[1]] == [("b", "reward"), ("a", "")]
    assert open_sets(Settings()) == ({}, ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[evaluation]\nbest_by = "b/reward"\n[evaluation.sets.a]', "one of the sets that the run evaluates: a"),
        ('[evaluation]\nbest_by = "a/pass@2"\n[evaluation.sets.a]', "set a does not measure 'pass@2' in a run but reward"),
        ('[evaluation]\nbest_by = "a/reward"\n[evaluation.sets.a]\nevery_batches = 0', "there is none"),
        ('[evaluation.sets.a]\nmetrics = ["elo"]', 'it has no elo: none of its 256 tasks has a number in the field'),
        ('[evaluation.sets.a]\nenvironment = "dataset"', 'evaluation.sets.a, environment "dataset": the dataset'),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_named_with_the_way_out(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_sets(loaded(tmp_path, text))
    assert said in str(caught.value)
