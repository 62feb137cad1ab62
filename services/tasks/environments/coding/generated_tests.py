"""Where open-r1/codeforces keeps the tests that it has made beside the official ones: a file for each contest."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gspo_services.shared.runtime.paths import expanded
from gspo_services.tasks.environments.layouts import ProgramRow
from gspo_services.tasks.environments.programs import GeneratedTests

FOLDER: Final = "generated_tests"


def generated_tests_of(row: ProgramRow, file: Path, named: str) -> GeneratedTests | None:
    """Where the generated tests of a row lie; None for a row that has none, or is complete without them.

    They are looked for in the folder ``named``, or in one called generated_tests beside the row's ``file`` or its folder, as
    in a copy of the whole data set. Nothing is read of them here: the whole set has hundreds of gigabytes.
    Raises: ValueError for an incomplete row without them.
    """
    if not row.num_generated:
        if row.is_incomplete:
            raise ValueError(
                "its official tests are incomplete (official_tests_complete) and nobody has generated others: a wrong "
                "program may pass; the set's configuration verifiable leaves such rows out"
            )
        return None
    contest = row.name.partition("/")[0]
    if not contest.isdecimal():
        raise ValueError(
            f'column "id" is "{row.name}": expected contest/problem such as "852/A", to find its generated tests'
        )
    name = f"test_cases_{int(contest):04d}.parquet"
    folders = [expanded(named)] if named else [file.parent / FOLDER, file.parent.parent / FOLDER]
    for folder in folders:
        path = folder / name
        if path.is_file():
            return GeneratedTests(path=str(path), problem=row.name, num_tests=row.num_generated)
    if not row.is_incomplete:
        return None
    raise ValueError(
        f"its official tests are incomplete (official_tests_complete), and its {row.num_generated} generated tests are not "
        f"in {' or '.join(str(folder / name) for folder in folders)}: fetch the data set's folder generated_tests (hf "
        "download open-r1/codeforces --repo-type dataset --include 'generated_tests/*') and name it in generated_tests_path"
    )
