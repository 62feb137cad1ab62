"""Sets of a configuration: what they inherit, and what is refused with the way out."""

from pathlib import Path
from typing import Any

import pytest

from gspo_services.runs.eval.sets import chosen_sets, named_sets, open_set
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import EvaluationSet, Settings, load_settings

BASE = (
    '[environment]\nname = "arithmetic"\noptions = { max_operand = 20 }\n[sampling]\nmax_turn_tokens = 8\nmax_tokens = 64\n'
)


def loaded(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "my.toml"
    path.write_text(BASE + text)
    return load_settings(path, (), {})


def test_a_set_has_its_own_tasks_and_sampling_and_the_rest_of_the_run(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path,
        """
        [evaluation.sets.hard]
        options = { operators = "*" }
        num_tasks = 5
        samples = 4
        temperature = 0.6
        top_p = 0.95
        max_turn_tokens = 12
        [evaluation.sets.other]
        environment = "calculator"
        temperature = 0
        """,
    )
    hard = settings.for_set(settings.evaluation.sets["hard"])
    assert hard.environment.options == {"max_operand": 20, "operators": "*"}
    assert (hard.sampling.temperature, hard.sampling.top_p, hard.sampling.max_turn_tokens) == (0.6, 0.95, 12)
    assert (hard.sampling.max_tokens, settings.sampling.temperature) == (64, 1.0)
    other = settings.for_set(settings.evaluation.sets["other"])
    assert (other.environment.name, other.environment.options, other.sampling.temperature) == ("calculator", {}, 0)
    opened = open_set(settings, "hard", settings.evaluation.sets["hard"])
    assert [task.index for task in opened.tasks] == [0, 1, 2, 3, 4]
    assert opened.metrics == ("reward", "avg@4", "pass@4", "maj@4")


def test_without_named_sets_there_is_the_runs_own(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "[evaluation]\nnum_tasks = 7\n")
    assert named_sets(settings) == {"held-out": EvaluationSet(num_tasks=7)}
    assert len(open_set(settings, "held-out", named_sets(settings)["held-out"]).tasks) == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[evaluation.sets.a]\nsamples = 0', "evaluation.sets.a.samples is 0"),
        ('[evaluation.sets.a]\nmetrics = ["pass@0"]', "evaluation.sets.a.metrics: pass@0: k is 0: expected at least 1"),
        ('[evaluation.sets.a]\nsamples = 4\nmetrics = ["pass@8"]', "set samples to 8 or more, or take a k up to 4"),
        ('[evaluation.sets.a]\nmetrics = ["f1"]', "'f1' is no metric: there are reward, avg@k"),
        ("[evaluation.sets.a]\nsample = 4", "evaluation.sets.a.sample: unknown key; did you mean 'samples'"),
        ("[evaluation.sets.a]\n[evaluation.sets.a]", "not valid TOML"),
        ("[evaluation.sets.reward]", "a set's name has 1 to 32 of a-z"),
        ('[evaluation.sets."A b"]', "a set's name has 1 to 32 of a-z"),
        ("[evaluation.sets.a]\nmax_turn_tokens = 64", "evaluation.sets.a: max_turn_tokens is 64 and max_tokens is 64"),
        ("[evaluation.sets.a]\nmax_tokens = 999999", "rollout.max_total_tokens is 65536 but evaluation.sets.a.max_tokens"),
        ("[evaluation.sets.a]\ntop_k = 0", "evaluation.sets.a.top_k is 0"),
    ],
)  # fmt: skip
def test_a_set_that_cannot_be_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        loaded(tmp_path, text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"metrics": ["elo"]}, 'set a: it has no elo: none of its 2 tasks has a number in the field "rating"'),
        ({"environment": "calculator", "metrics": ["maj@1"]}, 'it has no maj@1: environment "calculator" does not say'),
        ({"environment": "nowhere"}, 'set a, environment "nowhere": unknown environment'),
        ({"samples": 2, "metrics": ["avg@4"]}, "set a: avg@4 needs 4 samples of each task, and there will be 2"),
    ],
)
def test_a_metric_that_a_set_does_not_have_is_refused_with_the_way_out(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_set(Settings(), "a", EvaluationSet(num_tasks=2).model_copy(update=keys))
    assert said in str(caught.value)


def test_a_set_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty_tasks.py").write_text(
        "from gspo.tasks.environments import TaskSet\n"
        "class Nothing:\n    num_tasks = 0\n    def task(self, index): raise IndexError(index)\n"
        "class Empty(TaskSet):\n    def tasks(self, split): return Nothing()\n"
    )
    settings = Settings().model_copy(update={"agent": Settings().agent.model_copy(update={"command": ["true"]})})
    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(ConfigurationError, match='there is no task in the split "eval"'):
            open_set(settings, "a", EvaluationSet(environment="empty_tasks:Empty"))
    finally:
        sys.path.remove(str(tmp_path))


def test_only_known_sets_are_chosen_and_all_get_what_the_command_line_says(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "[evaluation.sets.a]\n[evaluation.sets.b]\nsamples = 3\n")
    chosen = chosen_sets(settings, ["b"], {"temperature": 0.5})
    assert {name: (each.samples, each.temperature) for name, each in chosen.items()} == {"b": (3, 0.5)}
    with pytest.raises(ConfigurationError, match="--only c: there is no such set; there are: a, b"):
        chosen_sets(settings, ["c"], {})
    with pytest.raises(ConfigurationError, match="named twice"):
        chosen_sets(settings, ["a", "a"], {})
