"""Results of samples equal a brute-force count, and say what they are."""

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from gspo_services.runs.eval.command import missing
from gspo_services.runs.eval.models import ScoredModel
from gspo_services.runs.eval.report import change_text, cost_lines, interval_text, value_text
from gspo_services.runs.eval.results import change, result_of
from gspo_services.runs.eval.samples import SampleFile, ScoredSample
from gspo_services.runs.eval.sets import ScoredSet, ScoredTask
from gspo_services.shared.eval_metrics import Estimate
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import EvaluationSet, Settings
from gspo_services.tasks.environments import create_environment

MODEL = ScoredModel(label="m", identity="i", directory=Path("m"))
METRICS = ("reward", "avg@6", "pass@1", "pass@3", "maj@3", "maj@6")


def chosen(num_tasks: int, samples: int, metrics: tuple[str, ...] = METRICS) -> ScoredSet:
    tasks = [ScoredTask(index=index, task={}, digest=f"d{index}", rating=None) for index in range(num_tasks)]
    terms = EvaluationSet(samples=samples)
    return ScoredSet(name="s", terms=terms, settings=Settings(), tasks=tasks, metrics=metrics, environment=None)


def drawn(rng: random.Random, task: int, number: int) -> ScoredSample:
    answer = rng.choice(["1", "2", "3", None])
    return ScoredSample(
        task=task, sample=number, seed=0, task_digest=f"d{task}", rating=None, end="done", reward=float(answer == "1"),
        answer=answer, num_action_tokens=5, engine_s=0.5,
    )  # fmt: skip


def counted(metric: str, samples: Sequence[ScoredSample]) -> float:
    """The metric of one task, subset by subset."""
    kind, _, k = metric.partition("@")
    if kind in ("reward", "avg"):
        return sum(each.reward or 0.0 for each in samples) / len(samples)
    values = []
    for subset in itertools.combinations(samples, int(k)):
        votes = Counter(each.answer for each in subset if each.answer is not None)
        first = [answer for answer, count in votes.items() if count == max(votes.values())]
        values.append(any(each.reward for each in subset) if kind == "pass" else first.count("1") / max(1, len(first)))
    return sum(values) / len(values)


def test_every_metric_equals_a_brute_force_count(tmp_path: Path) -> None:
    rng, wanted = random.Random(2), chosen(7, 6)
    with SampleFile(tmp_path / "s.jsonl", {}) as file:
        for task, number in itertools.product(range(7), range(6)):
            file.append(drawn(rng, task, number))
    with SampleFile(tmp_path / "s.jsonl", {}) as file:
        result = result_of(MODEL, wanted, file)
        for found in result.estimates:
            by_task = [counted(found.metric, [file.samples[task, number] for number in range(6)]) for task in range(7)]
            assert found.value == pytest.approx(sum(by_task) / 7, abs=1e-12), found.metric
            assert list(result.per_task[found.metric].values()) == pytest.approx(by_task)
        assert (result.num_samples, result.num_action_tokens, result.engine_s) == (42, 210, 21.0)
        # The samples of a larger set do not change a smaller one's result.
        few = result_of(MODEL, chosen(7, 3, ("avg@3",)), file)
        shares = [counted("avg@3", [file.samples[task, number] for number in range(3)]) for task in range(7)]
        assert few.estimates[0].value == pytest.approx(sum(shares) / 7)


def test_votes_count_by_what_they_mean_and_not_by_their_spelling(tmp_path: Path) -> None:
    """Two of five are right, in two spellings; two others agree on a wrong answer, and so do none of the rest."""
    said = [("x+1", 1.0), ("1+x", 1.0), ("x+2", 0.0), ("5", 0.0), (None, 0.0)]
    for environment, value in ((create_environment("math", {}), 1.0), (None, 0.5)):
        wanted = dataclasses.replace(chosen(1, 5, ("maj@5", "avg@5")), environment=environment)
        with SampleFile(tmp_path / f"{value}.jsonl", {}) as file:
            for number, (answer, reward) in enumerate(said):
                file.append(msgspec.structs.replace(drawn(random.Random(0), 0, number), reward=reward, answer=answer))
            assert result_of(MODEL, wanted, file).estimates[0].value == value


def test_a_sample_without_a_reward_counts_nowhere_and_is_missing(tmp_path: Path) -> None:
    wanted = chosen(2, 2, ("avg@2",))
    with SampleFile(tmp_path / "s.jsonl", {}) as file:
        for task, number, reward in ((0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0), (1, 1, None)):
            end = "failed" if reward is None else "done"
            file.append(
                ScoredSample(task=task, sample=number, seed=0, task_digest=f"d{task}", rating=None, end=end, reward=reward,
                       failure="the grader fell over" if reward is None else "")  # type: ignore[arg-type]
            )  # fmt: skip
        result = result_of(MODEL, wanted, file)
        assert (result.estimates[0].value, result.estimates[0].num_tasks) == (1.0, 1)
        assert (result.num_failed, result.first_failure) == (1, "the grader fell over")
        assert "1 more have no reward" in "\n".join(cost_lines([result]))
        assert [(task.index, number) for task, number in missing(wanted, file)] == [(1, 1)]
        # More samples of each task: only those that are not there.
        assert [(task.index, number) for task, number in missing(chosen(2, 3), file)] == [(1, 1), (0, 2), (1, 2)]


def test_a_task_that_has_changed_is_not_counted_with_its_former_samples(tmp_path: Path) -> None:
    with SampleFile(tmp_path / "s.jsonl", {}) as file:
        file.append(ScoredSample(task=0, sample=0, seed=0, task_digest="old", rating=None, end="done", reward=1.0))
        with pytest.raises(ConfigurationError, match="set s: task 0 is not the one that was sampled before"):
            result_of(MODEL, chosen(1, 1, ("avg@1",)), file)


def test_models_are_compared_over_the_tasks_that_both_have(tmp_path: Path) -> None:
    wanted, results = chosen(3, 1, ("avg@1",)), []
    for name, rewards in (("a", (0.0, 1.0, 0.0)), ("b", (1.0, 1.0, 0.0))):
        with SampleFile(tmp_path / name, {}) as file:
            for task, reward in enumerate(rewards):
                file.append(
                    ScoredSample(task=task, sample=0, seed=0, task_digest=f"d{task}", rating=None, end="done", reward=reward)
                )
            results.append(result_of(MODEL, wanted, file))
    moved = change(results[0], results[1], "avg@1")
    assert moved is not None
    assert moved.value == pytest.approx(1 / 3)
    assert change_text(moved) == "+0.333 +- 1.434"
    assert change(results[0], results[1], "elo") is None


def test_values_without_a_number_say_why() -> None:
    best = Estimate("elo", None, 2104.6, None, 5, "all_solved")
    worst = Estimate("elo", None, None, 700.2, 5, "none_solved")
    assert [(value_text(each), interval_text(each)) for each in (best, worst)] == [
        ("all solved", "2,105 or more"), ("none solved", "700 or less"),
    ]  # fmt: skip
    assert value_text(Estimate("pass@8", None, None, None, 0, "no_samples")) == "too few samples"
    assert interval_text(Estimate("avg@4", 0.5, 0.25, 0.75, 3)) == "0.250 to 0.750"
