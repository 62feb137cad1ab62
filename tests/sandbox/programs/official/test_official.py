"""What we say of programs beside what the owners' own runners say, which record.py has asked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.programs.official import codeforces, livecodebench
from tests.sandbox.programs.official.cases import Case, recorded
from tests.sandbox.programs.official.prime import EXPLAINED
from tests.sandbox.programs.scoring import Scoring, fenced

# The largest has 133 programs, some of which wait for a limit.
pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(1200)]


async def ours(scoring: Scoring, folder: Path, module: Any, environment: str) -> dict[str, bool]:
    """Whether each program is right."""
    verdicts = {}
    for case in module.CASES:
        verdicts[case.name] = await is_right(scoring, folder, case, module.ROWS[case.row], environment)
    return verdicts


async def is_right(scoring: Scoring, folder: Path, case: Case, row: Mapping[str, Any], environment: str) -> bool:
    answer = fenced(case.program, case.language)
    result = await scoring.score(folder, dict(row), answer, environment, languages=["python", "cpp"], try_solutions=False)
    assert result.failure is None, (case.name, result)
    return result.reward == 1.0


def differing(verdicts: Mapping[str, bool], name: str) -> set[str]:
    """Programs of which we and the owners say different things."""
    official = recorded()[name]["verdicts"]
    assert official.keys() == verdicts.keys()
    return {program for program, right in verdicts.items() if right is not official[program]}


async def test_livecodebench_by_its_own_runner(scoring: Scoring, tmp_path: Path) -> None:
    verdicts = await ours(scoring, tmp_path, livecodebench, "code")
    assert differing(verdicts, "livecodebench") == set(livecodebench.EXPLAINED)


async def test_codeforces_by_the_runner_of_open_r1(scoring: Scoring, tmp_path: Path) -> None:
    verdicts = await ours(scoring, tmp_path, codeforces, "contest")
    assert differing(verdicts, "codeforces") == set(codeforces.EXPLAINED)


async def test_the_rules_of_prime_beside_verl_apps_and_taco(scoring: Scoring, tmp_path: Path) -> None:
    verdicts = {}
    for case in livecodebench.CASES:
        truth = json.dumps(livecodebench.asked_of(livecodebench.ROWS[case.row]))
        row = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": truth}}
        verdicts[case.name] = await is_right(scoring, tmp_path, case, row, "code")
    for name, reasons in EXPLAINED.items():
        explained = {program for programs in reasons.values() for program in programs}
        assert differing(verdicts, name) == explained, name
