"""Reward functions in the forms of other trainers, as their users write them. Reward workers import them by name."""

import asyncio
import re
from typing import Any

# --- verl ---------------------------------------------------------------------------------------------------------------


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    """As custom_reward_function.path of verl takes it: a dict, of which "score" is the reward."""
    right = solution_str.strip().endswith(ground_truth)
    return {
        "score": 1.0 if right else -1.0,
        "acc": right,
        "pred": solution_str,
        "answer length": 3,
        "index": extra_info["index"],
        "turns": extra_info["num_turns"],
        "of_math": data_source == "math_dapo",
    }


async def number_of_verl(data_source, solution_str, ground_truth, extra_info=None, reward_router_address=None):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0)
    return 0.25 if data_source == "" and ground_truth == "4" else 0


def without_score(solution_str: str, **rest: Any) -> Any:
    return {"acc": 1.0, "reward": 2.0}


def of_two(solution_str, ground_truth):  # type: ignore[no-untyped-def]
    return solution_str == ground_truth


def accuracy_is_score(solution_str: str, **rest: Any) -> Any:
    return {"score": 1, "acc": True}


# --- TRL ----------------------------------------------------------------------------------------------------------------


def longer(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [float(len(completion)) for completion in completions]


def format_reward(completions, **kwargs):  # type: ignore[no-untyped-def]
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content) else 0.0 for content in contents]


def by_column(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):  # type: ignore[no-untyped-def]
    rewards = [1.0 if each == right else 0.0 for each, right in zip(completions, ground_truth, strict=True)]
    log_extra("golden", list(ground_truth))
    log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards


def by_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def for_maths_alone(prompts, completions, task, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0 if each == "math" else None for each in task]


async def slow(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0)
    return [1.0 if prompt[-1]["role"] == "user" else 0.0 for prompt in prompts]


def of_a_trainer(completions, trainer_state, **kwargs):  # type: ignore[no-untyped-def]
    return [trainer_state.global_step]


def two_for_one(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0, 2.0]


def one_number(completions, **kwargs):  # type: ignore[no-untyped-def]
    return 1.0
