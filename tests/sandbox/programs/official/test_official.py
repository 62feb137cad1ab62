"""What we say of programs beside what the owners' own runners say, which record.py has asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.programs.official import codeforces, livecodebench
from tests.sandbox.programs.official.cases import Case, recorded
from tests.sandbox.programs.scoring import Scoring, fenced

pytestmark = pytest.mark.sandbox


async def ours(scoring: Scoring, folder: Path, case: Case, row: Mapping[str, Any], environment: str) -> bool:
    answer = fenced(case.program, case.language)
    result = await scoring.score(folder, dict(row), answer, environment, languages=["python", "cpp"], try_solutions=False)
    assert result.failure is None, (case.name, result)
    return result.reward == 1.0


async def differing(
    scoring: Scoring, folder: Path, module: Any, name: str, rows: Mapping[str, Any], environment: str
) -> set[str]:
    """Programs of which we and the owners say different things."""
    official = recorded()[name]["verdicts"]
    assert sorted(official) == sorted(case.name for case in module.CASES)
    return {
        case.name
        for case in module.CASES
        if await ours(scoring, folder, case, rows[case.row], environment) is not official[case.name]
    }


async def test_livecodebench_by_its_own_runner(scoring: Scoring, tmp_path: Path) -> None:
    found = await differing(scoring, tmp_path, livecodebench, "livecodebench", livecodebench.ROWS, "code")
    assert found == set(livecodebench.EXPLAINED)


async def test_codeforces_by_the_runner_of_open_r1(scoring: Scoring, tmp_path: Path) -> None:
    found = await differing(scoring, tmp_path, codeforces, "codeforces", codeforces.ROWS, "contest")
    assert found == set(codeforces.EXPLAINED)
