"""Rows of agentica-org/DeepCoder-Preview-Dataset.

Columns as in rllm-org/rllm: cookbooks/deepcoder/prepare_deepcoder_data.py: problem, tests (JSON, see listed_tests.py),
solutions, starter_code, metadata (JSON with func_name). Programs are scored by LiveCodeBench's runner, with its six seconds
(rllm/rewards/code_reward.py, lcb_check_correctness_v2). Functions of tests in APPS' form, which that cannot call, are
compared as verl does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gspo_services.tasks.environments.layouts.listed_tests import listed_tests
from gspo_services.tasks.environments.layouts.livecodebench import MEMORY_BYTES, TEST_S
from gspo_services.tasks.environments.layouts.program_rows import ProgramRow, column, json_in, text_in, total_of

DEEPCODER_COLUMNS: Final = frozenset({"problem", "tests"})


def deepcoder_row(record: Mapping[str, Any]) -> ProgramRow:
    """The problem of a row. Raises: ValueError with the column and what is wrong."""
    column(record, "tests")
    metadata = json_in(record, "metadata") if record.get("metadata") else {}
    if not isinstance(metadata, Mapping):
        raise ValueError(f'column "metadata" is {repr(metadata)[:100]}, not a map')
    found = json_in(record, "tests")
    tests, function = listed_tests(found, "tests", str(metadata.get("func_name") or ""))
    by_livecodebench = not function or (isinstance(found, list) and "testtype" in found[0])
    return ProgramRow(
        statement=text_in(record, "problem"),
        tests=tests,
        starter_code=text_in(record, "starter_code", needed=False),
        function=function,
        owner="livecodebench" if by_livecodebench else "prime",
        time_limit_s=TEST_S,
        memory_bytes=MEMORY_BYTES,
        total_s=total_of(TEST_S, len(tests)),
    )
