"""Question j of the study: the margin of a run's learning rate, which runs it needs, and the rule fixed beforehand."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks.study.config import RunConfig
from benchmarks.study.questions import margin as question
from benchmarks.study.questions.margin import ARMS, BETWEEN, NARROW_RATE, NARROWER, RATES, SEEDS
from benchmarks.study.reporting import margin, plots
from benchmarks.study.reporting.summary import RunSummary, summarise_run
from benchmarks.study.results import Results
from benchmarks.study.run_record import RunRecord

ALL = tuple(sorted(RATES + BETWEEN))
SOUND = dict.fromkeys(ARMS, 2e-4)


def _results(last: Mapping[str, float | list[float]], *, with_between: bool = True) -> Results:
    """Make runs that collapse above ``last``, a rate of each arm, or one for each of its seeds."""
    summaries = []
    for arm, _, config in [*question.comparison(), *(question.between() if with_between else [])]:
        limit = last[arm]
        if isinstance(limit, list):
            limit = limit[SEEDS.index(config.seed)]
        summaries.append(_summary(config, sound=config.learning_rate <= limit))
    return Results({summary.run_id: summary for summary in summaries})


def _summary(config: RunConfig, *, sound: bool) -> RunSummary:
    rows = [{"batch": 5.0 * index, "eval": 0.4 if index < 9 or sound else 0.1} for index in range(11)]
    return summarise_run(RunRecord(config.run_id, config.as_dict(), rows))


@pytest.mark.parametrize(("last", "octaves"), [(1e-5, -1), (5e-5, 0), (1e-4, 1), (2e-4, 2), (4e-4, 3), (8e-4, 4), (1.0, 4)])
def test_the_margin_is_the_highest_rate_below_the_first_collapse(last: float, octaves: int) -> None:
    results = _results(SOUND | {"GRPO": last})
    assert [margin.margin(results, "GRPO", seed) for seed in SEEDS] == [octaves] * 4
    assert margin.margin(results, "GSPO", SEEDS[0]) == 2


def test_a_rate_that_is_sound_above_a_collapse_counts_for_nothing() -> None:
    results = _results(SOUND)
    at_2e4 = results.at("j", "GSPO", "lr 0.0002")
    at_2e4[SEEDS[0]] = results.at("j", "GSPO", "lr 0.0008")[SEEDS[0]]
    results.at("j", "GSPO", "lr 0.0008")[SEEDS[0]] = at_2e4[SEEDS[1]]
    # 1e-4 lies between the last sound rate and the first collapse.
    assert margin.needed_between(results, "GSPO", SEEDS[0]) == 1e-4
    assert margin.margin(results, "GSPO", SEEDS[0]) == 1


def test_one_run_between_is_needed_and_only_once_its_neighbours_are_there() -> None:
    last = {"GSPO": 8e-4, "GRPO": 1e-5, "GRPO + replay": 5e-5, "GSPO + replay": 2e-4}
    results = _results(last, with_between=False)
    assert margin.missing(results) == [
        (arm, seed, rate) for seed in SEEDS for arm, rate in (("GRPO + replay", 1e-4), ("GSPO + replay", 4e-4))
    ]
    with pytest.raises(ValueError, match="8 runs are missing: the rule asks for four whole seeds"):
        margin.verdict(results)
    assert margin.comparison(results) == "8 runs are missing."
    results.at("j", "GRPO + replay", "lr 0.0008").pop(SEEDS[0])
    assert margin.missing(results)[0] == ("GRPO + replay", SEEDS[0], 8e-4)
    assert len(margin.missing(results)) == 8
    assert margin.missing(_results(last)) == []


@pytest.mark.parametrize(
    ("gspo", "grpo", "replayed", "said"),
    [
        ([4e-4] * 4, [2e-4] * 4, [2e-4] * 4, ("shown", "shown")),
        # Above 0 in each seed, though no interval lies above 0.
        ([4e-4, 4e-4, 4e-4, 8e-4], [5e-5, 2e-4, 2e-4, 4e-4], [8e-4] * 4, ("shown", "open")),
        ([4e-4, 4e-4, 4e-4, 2e-4], [2e-4] * 4, [4e-4] * 4, ("open", "open")),
        ([2e-4] * 4, [2e-4] * 4, [4e-4] * 4, ("refuted", "refuted")),
        ([1e-4] * 4, [2e-4] * 4, [1e-4] * 4, ("refuted", "shown")),
        ([2e-4, 2e-4, 2e-4, 5e-5], [1e-4, 1e-4, 1e-4, 4e-4], [1e-4] * 4, ("refuted", "open")),
    ],
)
def test_the_rule_is_the_one_fixed_beforehand(
    gspo: list[float], grpo: list[float], replayed: list[float], said: tuple[str, str]
) -> None:
    results = _results({"GSPO": gspo, "GRPO": grpo, "GRPO + replay": replayed, "GSPO + replay": 2e-4})
    assert margin.verdict(results) == said


def test_the_regime_misses_its_aim_without_a_collapse_of_grpo_or_with_every_one_at_the_lowest_rate() -> None:
    assert not margin.missed_its_aim(_results(SOUND))
    assert margin.missed_its_aim(_results(SOUND | {"GRPO": 8e-4}))
    assert margin.missed_its_aim(_results(dict.fromkeys(ARMS, 1e-5)))
    assert not margin.missed_its_aim(_results(dict.fromkeys(ARMS, 1e-5) | {"GRPO": [5e-5, 1e-5, 1e-5, 1e-5]}))


def test_the_table_has_margins_differences_and_what_collapsed_at_each_rate() -> None:
    table = margin.comparison(_results(SOUND | {"GSPO": [2e-4, 2e-4, 2e-4, 4e-4]})).splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == ["2, 2, 2, 3", "2, 2, 2, 2", "2, 2, 2, 2", "2, 2, 2, 2"]
    # t(3) = 3.182, s = 0.5, n = 4
    assert table[2].split(" | ")[2:5] == ["2.25", "+0.250 ± 0.795", "+0.250 ± 0.795"]
    assert [cell[:4] for cell in table[2].strip("| ").split(" | ")[5:]] == ["0.40", "0.40", "0.40", "0.18", "0.10"]
    assert table[2].strip("| ").split(" | ")[-2:] == ["0.18 (3/4)", "0.10 (4/4)"]


def test_a_narrower_range_differs_from_the_arm_of_j_by_eps_alone() -> None:
    of_j = {(arm, config.seed): config for arm, _, config in question.comparison() if config.learning_rate == NARROW_RATE}
    for row, _, config in question.narrower():
        arm = row.removesuffix(", narrower")
        assert config == replace(of_j[arm, config.seed], **NARROWER[arm])
        assert set(NARROWER[arm]) == {"eps_low", "eps_high"}
    assert len(question.narrower()) == len(NARROWER) * len(SEEDS)


@pytest.mark.parametrize(("fallen", "said"), [(0, "shown"), (1, "shown"), (2, "open"), (3, "open"), (4, "refuted")])
def test_the_rule_on_the_width_is_the_one_fixed_beforehand(fallen: int, said: str) -> None:
    with pytest.raises(ValueError, match="4 runs are missing: the rule asks for four whole seeds"):
        margin.verdict_on_width(_results(SOUND), "GRPO")
    found = [
        _summary(config, sound=SEEDS.index(config.seed) >= fallen)
        for row, _, config in [*question.comparison(), *question.narrower()]
        if config.learning_rate == NARROW_RATE and row in ("GRPO, narrower", "GSPO", "GRPO")
    ]
    results = Results({summary.run_id: summary for summary in found})
    assert margin.verdict_on_width(results, "GRPO") == said
    rows = [line.strip("| ").split(" | ") for line in margin.widths(results).splitlines()[2:]]
    assert [(row[0], row[-1]) for row in rows][:3] == [(arm, f"{fallen}/4") for arm in ("GSPO", "GRPO", "GRPO, narrower")]


def test_the_plot_has_a_line_for_each_objective_and_a_point_for_each_run() -> None:
    figure = plots._margin(_results(SOUND))
    lines = figure.axes[0].lines
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == list(ARMS)
    assert len(lines) == len(ARMS) * (1 + len(ALL) * len(SEEDS))
    assert sum(line.get_marker() == "x" for line in lines) == len(ARMS) * 2 * len(SEEDS)
    plots.plt.close(figure)
