"""Rows of programs as verl reads them: PRIME-RL/Eurus-2-RL-Data and those made like it.

Columns: data_source, prompt (messages), ability, reward_model ({"style", "ground_truth"}), extra_info. The ground truth of a
program is JSON: tests in APPS' form, or a list of tests (listed_tests.py). verl/utils/reward_score/__init__.py hands them
to prime_code, which gives each test five seconds at first and ten later; its reward is the share of the first ten tests, for
which partial_credit stands here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from gspo_services.tasks.environments.layouts.listed_tests import listed_tests
from gspo_services.tasks.environments.layouts.program_rows import ProgramRow, column, total_of
from gspo_services.tasks.environments.sources import chat_messages

VERL_COLUMNS: Final = frozenset({"prompt", "reward_model"})
TEST_S: Final = 10.0


def verl_row(record: Mapping[str, Any]) -> ProgramRow:
    """The problem of a row. Raises: ValueError with the column and what is wrong."""
    rewarded = column(record, "reward_model")
    if not isinstance(rewarded, Mapping) or "ground_truth" not in rewarded:
        raise ValueError(f'column "reward_model" is {repr(rewarded)[:100]}: expected a map with "ground_truth"')
    truth = rewarded["ground_truth"]
    try:
        found = json.loads(truth) if isinstance(truth, str) else truth
    except (ValueError, RecursionError):
        found = truth
    if not isinstance(found, (Mapping, list)) or (
        isinstance(found, list) and not all(isinstance(each, Mapping) for each in found)
    ):
        raise ValueError(
            f"reward_model.ground_truth is {repr(truth)[:100]}, and no tests of a program: rows of mathematics are for the "
            "environments math and dataset"
        )
    tests, function = listed_tests(found, "reward_model.ground_truth")
    prompt = column(record, "prompt")
    if not isinstance(prompt, (str, list)) or not prompt:
        raise ValueError(f'column "prompt" is {repr(prompt)[:100]}: expected messages or text')
    extra = record.get("extra_info")
    index = extra.get("index") if isinstance(extra, Mapping) else None
    return ProgramRow(
        statement="",
        messages=chat_messages("prompt", prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]),
        tests=tests,
        function=function,
        owner="prime",
        time_limit_s=TEST_S,
        total_s=total_of(TEST_S, len(tests)),
        name="" if index is None else f"{record.get('data_source', '')}/{index}".lstrip("/"),
    )
