"""Question g of the study: its deep model, its long chains, the credit of single numbers, and its table."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.study.__main__ import estimate
from benchmarks.study.config import RunConfig
from benchmarks.study.decoding import Answer, Decoder, Order
from benchmarks.study.learner import ROUTER_PULL, Learner
from benchmarks.study.questions import paper
from benchmarks.study.questions.grid import Cell, cells
from benchmarks.study.reporting.paper import engine as engine_table
from benchmarks.study.reporting.paper import paper as paper_table
from benchmarks.study.reporting.plots import draw_all
from benchmarks.study.reporting.summary import RunSummary, summarise_run
from benchmarks.study.results import Results, load_summaries
from benchmarks.study.run import batches
from benchmarks.study.run_record import RunRecord
from benchmarks.study.sampler import MAX_NEW_TOKENS, Episode
from benchmarks.study.start_model import ROUTER_STD, SIZES, load_start_model, study_environment
from benchmarks.study.tasks.countdown import right_chain
from benchmarks.study.tasks.credit import NumberGrades, number_advantages
from gspo.model.packing import TrainSequence
from gspo.moe.experts import find_routers
from gspo_services.prepare.tiny_models.tiny import build_model
from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
EXPLORATORY_SEED = 900
MICRO = RunConfig(
    task="countdown", seed=0, num_batches=1, num_sequences=16, group_size=2, num_mini_batches=2, num_eval_episodes=8
)
START_STEPS = 6


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the start models of this module's runs."""
    return tmp_path_factory.mktemp("study")


def ids_of(text: str, *, ended: bool = True) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False) + [TOKENIZER.eos_token_id] * ended


def grades_of(text: str, *, ended: bool = True) -> list[float]:
    return NumberGrades(TOKENIZER, "87-30", ids_of(text, ended=ended)).rewards


def test_every_kept_result_belongs_to_the_configuration_that_it_names() -> None:
    for summary in load_summaries().values():
        config = RunConfig(**summary.config)
        assert config.run_id == summary.run_id
        assert config.task == "long-countdown" or (config.model, config.credit) == ("tiny", "answer")


def test_the_deep_start_model_is_deep_and_kept_beside_the_tiny_one(studio: Path) -> None:
    deep, tiny = (load_start_model(studio, "countdown", 0, model=model, num_steps=1) for model in ("deep", "tiny"))
    sizes = (deep.config.num_hidden_layers, deep.config.num_experts, deep.config.num_experts_per_tok)
    assert sizes == (6, 64, 8)
    assert tiny.config.num_hidden_layers == 2
    again = load_start_model(studio, "countdown", 0, model="deep", num_steps=1)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in deep.state_dict().items())
    assert sorted(path.name for path in studio.glob("countdown*-0-1.*")) == [
        "countdown-0-1.safetensors",
        "countdown-deep-0-1.safetensors",
    ]


def test_the_deep_start_models_routers_are_as_they_were_drawn_and_the_rest_has_seen_them_jitter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jittered = load_start_model(tmp_path, "countdown", 0, model="deep", num_steps=2)
    monkeypatch.setattr("benchmarks.study.start_model.ROUTER_JITTER", 0.0)
    still = load_start_model(tmp_path / "still", "countdown", 0, model="deep", num_steps=2)
    for ours, theirs in zip(find_routers(jittered).values(), find_routers(still).values(), strict=True):
        assert ours.weight.requires_grad
        assert torch.equal(ours.weight, theirs.weight)
        assert float(ours.weight.detach().std()) == pytest.approx(ROUTER_STD["deep"], rel=0.05)
    assert not torch.equal(jittered.lm_head.weight, still.lm_head.weight)


@torch.no_grad()
def test_the_decoder_gives_the_deep_models_own_log_probs() -> None:
    torch.manual_seed(0)
    model = build_model(TOKENIZER, **SIZES["deep"])
    for parameter in model.parameters():
        parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    prompt = [5, 9, 11]
    decoder = Decoder(config=model.config, pad_id=0, end_id=len(TOKENIZER))
    (answer,) = decoder.decode([Order(model.state_dict(), [prompt], 0)], 12)[0]
    ids = torch.tensor(prompt + answer.ids)
    logprobs_TV = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    expected_T = logprobs_TV[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]
    assert answer.logprobs == pytest.approx(expected_T.tolist(), abs=1e-4)


def test_long_chains_have_100_to_160_tokens_and_the_careless_teacher_is_right_about_half_of_the_time() -> None:
    environment, rng = study_environment("long-countdown"), random.Random(0)
    assert right_chain("101-9").startswith("092 083 074 ")
    right, lengths = [], set()
    for _ in range(400):
        problem, said = environment.demonstration(rng, careful=False)
        chain = right_chain(problem.content)
        lengths.add(len(ids_of(chain)))
        right.append(environment.step({"problem": problem.content}, said.content).reward)
        assert {len(number) for number in said.content.rstrip("?").split()} <= {3}
        assert (right[-1] == 1) == (said.content == chain)
    assert min(lengths) == 100
    assert max(lengths) == 160 < MAX_NEW_TOKENS["long-countdown"]
    assert 0.4 < sum(right) / len(right) < 0.65


def test_the_first_wrong_number_ends_a_chains_grades() -> None:
    assert grades_of("57 27") == [1.0, 1.0]
    assert grades_of("56 26") == [0.0]
    assert grades_of("57 28") == [1.0, 0.0]
    assert grades_of("57") == [0.0]
    assert grades_of("57 27 00") == [1.0, 0.0]
    assert grades_of("57 ?") == [1.0, 0.0]
    assert grades_of("57 27", ended=False) == [1.0, 0.0]
    assert NumberGrades(TOKENIZER, "287-9", ids_of("278")).num_tokens == 4


def sequence_of(text: str) -> TrainSequence:
    ids = ids_of(text)
    return Episode([1, 2], Answer(ids, [-5.0] * len(ids)), 0.0).train_sequence(0)


def test_a_number_is_compared_with_the_same_one_of_the_answers_that_got_so_far() -> None:
    texts = ["57 27", "57 28", "56 26"]
    grades = [NumberGrades(TOKENIZER, "87-30", ids_of(text)) for text in texts]
    right, late, early = number_advantages([sequence_of(text) for text in texts], grades, np.zeros(3, dtype=np.int64))
    # First numbers: 1, 1, 0 with mean 2/3 and deviation 0.577; second ones: 1, 0 with mean 1/2 and deviation 0.707.
    first, second = 0.57735, 0.70711
    assert right.tolist() == pytest.approx([0, 0, first, first, first, second, second, second], abs=1e-4)
    assert late.tolist() == pytest.approx([0, 0, first, first, first, -second, -second, -second], abs=1e-4)
    assert early.tolist() == pytest.approx([0, 0, *[-2 * first] * 3, 0, 0, 0], abs=1e-4)


def test_the_learner_trains_on_the_grades_and_not_on_the_rewards(studio: Path) -> None:
    config = replace(MICRO, credit="number")
    texts = ["57 27", "57 28"] * 8
    sequences, rewards = [sequence_of(text) for text in texts], [0.0] * 16
    for answers, has_gradient in ((texts, True), (["57 27"] * 16, False)):
        model = load_start_model(studio / "start", "countdown", 0, num_steps=START_STEPS)
        grades = [NumberGrades(TOKENIZER, "87-30", ids_of(text)) for text in answers]
        record = Learner(model, config).train(sequences, rewards, version=0, diagnose=False, grades=grades)
        assert (record["grad_norm"] > 0) == has_gradient


def test_a_run_with_credit_by_number_grades_its_own_samples(studio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Watched(NumberGrades):
        def __init__(self, tokenizer: object, problem: str, answer_ids: list[int]) -> None:
            super().__init__(TOKENIZER, problem, answer_ids)
            asked.append(problem)

    monkeypatch.setattr("benchmarks.study.run.NumberGrades", Watched)
    list(batches(studio, replace(MICRO, credit="number"), start_steps=START_STEPS))
    source = study_environment("countdown").tasks("train")
    assert asked == [source.task(index)["problem"] for index in range(8) for _ in range(2)]


def test_credit_by_number_needs_a_chain() -> None:
    with pytest.raises(ValueError, match="credit is \"number\" with task 'arithmetic'"):
        RunConfig(task="arithmetic", seed=0, num_batches=1, credit="number")


def test_the_experts_that_a_whole_batch_changed_are_counted_with_and_without_replay(studio: Path) -> None:
    sequences = [sequence_of(text) for text in ["57 27", "57 28"] * 8]
    for replay in (False, True):
        config = replace(MICRO, routing_replay=replay, learning_rate=1e-2)
        model = load_start_model(studio / "start", "countdown", 0, num_steps=START_STEPS)
        record = Learner(model, config).train(sequences, [1.0, 0.0] * 8, version=0, diagnose=True)
        assert 0 < record["changed_after"] < 1
        assert ("changed_1" in record) != replay


def test_the_deep_models_routers_are_pulled_back_after_each_update(studio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [sequence_of(text) for text in ["57 27", "57 28"] * 8]
    config = replace(MICRO, model="deep", num_mini_batches=1)
    moved = []
    for pull in (0.0, ROUTER_PULL):
        monkeypatch.setattr("benchmarks.study.learner.ROUTER_PULL", pull)
        model = load_start_model(studio, "countdown", 0, model="deep", num_steps=1)
        weights = [router.weight for router in find_routers(model).values()]
        before = [weight.detach().clone() for weight in weights]
        Learner(model, config).train(sequences, [1.0, 0.0] * 8, version=0, diagnose=False)
        moved.append(torch.stack([weight.detach() - first for weight, first in zip(weights, before, strict=True)]))
    assert float(moved[0].abs().max()) > 1e-4
    torch.testing.assert_close(moved[1], (1 - ROUTER_PULL) * moved[0])


def a_summary(rewards: list[float], *, changed: float | None = None, diverged: bool = False) -> RunSummary:
    rows = [{"batch": 5.0 * index, "eval": reward, "clip": 0.25} for index, reward in enumerate(rewards)]
    for row in rows[:-1]:
        row |= {"tokens": 1000.0 * (row["batch"] + 5)} | ({} if changed is None else {"changed_after": changed})
    if diverged:
        rows.append({"batch": 5.0 * len(rewards), "diverged": 1.0})
    return summarise_run(RunRecord("x", {"num_batches": 10, "eval_every": 5}, rows))


def test_the_worst_drop_is_from_the_best_so_far() -> None:
    assert a_summary([0.3, 0.9, 0.4, 0.8]).worst_drop == pytest.approx(0.5)
    assert a_summary([0.3, 0.4, 0.5]).worst_drop == 0
    assert a_summary([0.3, 0.9], diverged=True).worst_drop == pytest.approx(0.9)


def test_a_summary_keeps_changed_experts_where_they_were_measured() -> None:
    measured, other = a_summary([0.3, 0.5, 0.6], changed=0.125), a_summary([0.3, 0.5])
    assert measured.changed == [0.125, 0.125]
    assert measured.means["changed_after"] == 0.125
    assert "changed" not in other.as_dict()
    for summary in (measured, other):
        assert RunSummary.from_dict(json.loads(json.dumps(summary.as_dict()))) == summary


def test_the_table_has_a_row_for_each_arm_before_any_run_is_there() -> None:
    head, _, *rows = paper_table(Results({}, [])).splitlines()
    assert head.startswith("| objective | n |")
    assert rows == [f"| {arm} | 0 |" + " - |" * 8 for arm in paper.ARMS]
    assert len(engine_table(Results({}, [])).splitlines()) == 2 + len(paper.ENGINE_ARMS)


def test_the_table_and_the_plot_show_the_runs_that_are_there(tmp_path: Path) -> None:
    made = {
        (paper.GSPO, 0): a_summary([0.2, 0.64, 0.8], changed=0.125),
        (paper.GSPO, 1): a_summary([0.2, 0.5, 0.7], changed=0.125),
        ("GRPO", 0): a_summary([0.4, 0.64, 0.0], changed=0.25),
    }
    grid = [Cell("g", row, column, config) for row, column, config in paper.comparison()]
    summaries = {
        cell.config.run_id: made[cell.row, cell.config.seed] for cell in grid if (cell.row, cell.config.seed) in made
    }
    results = Results(summaries, grid)
    gspo, grpo, *others = paper_table(results).splitlines()[2:]
    assert gspo == "| GSPO | 2 | 0.66 | - | 0.66 | 0.00 | 0/2 | 25 % | 12 % | 5 (2/2) |"
    assert grpo == "| GRPO | 1 | 0.32 | -0.400 | 0.32 | 0.64 | 1/1 | 25 % | 25 % | never (0/1) |"
    assert all(" | 0 | - |" in row for row in others)
    assert [path.name for path in draw_all(results, [], tmp_path)] == ["paper.png"]


def test_the_arms_differ_in_the_objective_alone_and_no_seed_was_used_to_find_the_regime() -> None:
    runs = [config for _, _, config in paper.comparison()]
    assert len({config.run_id for config in runs}) == 3 * len(paper.ARMS)
    assert {replace(paper.REGIME, seed=config.seed) for config in runs} == {
        replace(
            config,
            ratio_unit="sequence",
            eps_low=paper.REGIME.eps_low,
            eps_high=paper.REGIME.eps_high,
            routing_replay=False,
            credit="answer",
        )
        for config in runs
    }
    assert EXPLORATORY_SEED % paper.REGIME.start_models not in {seed % paper.REGIME.start_models for seed in paper.SEEDS}
    assert {cell.config.run_id for cell in cells() if cell.question == "g"} == {config.run_id for config in runs}


def test_replayed_experts_are_compared_on_start_models_of_their_own_by_arms_that_differ_in_replay_and_ratio() -> None:
    runs = {(row, config.seed): config for row, _, config in paper.engine_comparison()}
    assert not {config.start_number for config in runs.values()} & {*paper.SEEDS, EXPLORATORY_SEED}
    for seed in paper.ENGINE_SEEDS:
        gspo, grpo = (runs[row, seed] for row in ("GSPO", "GRPO"))
        assert grpo == replace(gspo, **paper.TOKEN_RATIO)
        assert runs["GSPO + R3", seed] == replace(gspo, routing_replay=True, replay_from="engine")
        assert runs["GRPO + R3", seed] == replace(runs["GRPO + R2", seed], replay_from="engine")
        assert runs["GRPO + R2", seed] == replace(grpo, routing_replay=True)


def test_a_run_is_long_in_batches_and_fits_a_quarter_of_an_hour() -> None:
    assert paper.REGIME.num_batches >= 200
    assert all(60 < estimate(config) <= 15 * 60 for _, _, config in paper.comparison())
