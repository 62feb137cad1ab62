"""What processes of one run must agree on, and what they need not."""

import pytest

from gspo_services.shared.settings.configuration import load_settings
from gspo_services.shared.settings.fingerprint import run_fingerprint

BASE = ("model.path=/models/tiny",)


def fingerprint(*overrides: str) -> str:
    return run_fingerprint(load_settings(None, (*BASE, *overrides), {}))


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=9",
        "model.path=/models/other",
        "model.template_arguments={enable_thinking = false}",
        "model.show_special_tokens=true",
        "environment.name=calculator",
        "environment.options={digits = 3}",
        "reward.on_deadline=zero",
        "reward.model=/models/rm",
        "reward.model_weight=0.5",
        "reward.model_input=text",
        "reward.model_max_tokens=100",
        "reward.model_too_long=truncate",
        "reward.group=my_rewards:rank",
        "batch.group_size=3",
        "batch.max_lag=7",
    ],
)
def test_what_changes_the_data_changes_the_fingerprint(override: str) -> None:
    assert fingerprint(override) != fingerprint()


@pytest.mark.parametrize(
    "override",
    [
        "model.path=/elsewhere/tiny",
        "run.directory=/tmp/x",
        "run.num_batches=7",
        "broker.lease_s=3.0",
        "reward.workers=3",
        "reward.model_device=cuda:3",
        "reward.model_batch_tokens=100",
        "learner.learning_rate=1e-5",
        "evaluation.num_tasks=3",
        # Recorded for each group, and sent with each lease.
        "sampling.temperature=0.5",
        "sampling.max_tokens=999",
        "schedule.max_tokens={steps = [[20, 999]]}",
    ],
)
def test_what_may_differ_or_be_continued_with_does_not(override: str) -> None:
    assert fingerprint(override) == fingerprint()


@pytest.mark.parametrize(
    ("override", "matters"),
    [
        ("agent.function=mine:other", True),
        ("agent.on_replay=restart", True),
        ("agent.on_deadline=zero", True),
        ("agent.weights={right = 2.0}", True),
        ("agent.python=/usr/bin/python3", False),
        ("agent.workers=5", False),
        ("agent.deadline_s=60", False),
        ("agent.port=7010", False),
    ],
)
def test_what_an_agent_samples_matters_and_where_it_runs_does_not(override: str, matters: bool) -> None:
    agent = ("agent.function=mine:solve",)
    assert (fingerprint(*agent, override) != fingerprint(*agent)) == matters
    assert fingerprint(*agent) != fingerprint()


def test_the_numbers_of_a_reward_model_matter_where_there_is_one() -> None:
    model, half = "reward.model=/models/rm", "reward.model_dtype=bfloat16"
    assert fingerprint(model, half) != fingerprint(model)
    assert fingerprint(model, half) != fingerprint(model, "reward.model_dtype=float16")
    assert fingerprint(model, "reward.model_dtype=auto") == fingerprint(model)
    assert fingerprint(half) == fingerprint()


def test_a_fingerprint_is_32_hexadecimal_characters() -> None:
    assert len(fingerprint()) == 32
    assert set(fingerprint()) <= set("0123456789abcdef")


def test_a_run_that_an_earlier_release_began_has_the_fingerprint_that_it_gave_it() -> None:
    assert run_fingerprint(load_settings(None, (), {})) == "eeff2296dd78cfdcc02e6d7a0bf9d31a"  # gspo 0.1.0's, for one broker
