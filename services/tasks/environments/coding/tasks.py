"""Tasks out of rows of programs."""

from __future__ import annotations

import msgspec

from gspo.tasks.environments import Task
from gspo_services.tasks.environments.layouts import LayoutName, ProgramRow
from gspo_services.tasks.environments.programs import (
    PACKED_TESTS_BYTES,
    FiledTests,
    GeneratedTests,
    Problem,
    digest_of,
    packed_tests,
)
from gspo_services.tasks.environments.rows import plain_task


def program_task(
    row: ProgramRow, path: str, place: str, layout: LayoutName, generated: GeneratedTests | None = None
) -> Task:
    """{"prompt", "place", "problem"} and what the row says of "name", "rating", "difficulty", "date" and "language".

    The prompt is text, or the messages that the row has. ``place`` is "line 3" or "row 3". Tests that are too large for a
    task stay in the file, and ``generated`` ones in theirs.
    Raises: ValueError when the rest is too large for a task.
    """
    tests, packed = packed_tests(row.tests)
    in_file = None
    if len(packed) > PACKED_TESTS_BYTES:
        number = int(place.rpartition(" ")[2])
        in_file, packed = FiledTests(path=path, row=number, layout=layout, digest=digest_of(row.tests)), ""
    problem = Problem(
        tests=tests,
        packed=packed,
        in_file=in_file,
        generated=generated,
        owner=row.owner,
        function=row.function,
        checker=row.checker,
        time_limit_s=row.time_limit_s,
        memory_bytes=row.memory_bytes,
        total_s=row.total_s,
        solution=row.solution,
        solution_language=row.solution_language,
    )
    prompt = row.statement
    if row.starter_code.strip():
        prompt += f"\n\n```python\n{row.starter_code.rstrip()}\n```"
    task: Task = {
        "prompt": msgspec.to_builtins(row.messages) or prompt,
        "place": f"{path}, {place}",
        "problem": msgspec.to_builtins(problem),
    }
    if row.language:
        task["language"] = row.language
    if row.name:
        task["name"] = row.name
    if row.rating is not None:
        task["rating"] = row.rating
    if row.difficulty:
        task["difficulty"] = row.difficulty
    if row.date is not None:
        task["date"] = row.date.isoformat()
    return plain_task(task)


def content_of_program_task(task: Task) -> object:
    """The task without where it lies: tests that stayed in a file are known by their digest."""
    content = {key: value for key, value in task.items() if key != "place"}
    problem = content["problem"]
    assert isinstance(problem, dict)
    if isinstance(filed := problem.get("in_file"), dict):
        problem = {**problem, "in_file": filed["digest"]}
    if isinstance(generated := problem.get("generated"), dict):
        problem = {**problem, "generated": generated["problem"]}
    return {**content, "problem": problem}
