"""The program in an answer."""

import pytest

from gspo_services.tasks.environments.programs import TOOLCHAINS, AnsweredProgram, language_of, program_in


@pytest.mark.parametrize(
    ("answer", "source", "tag"),
    [
        ("```python\nprint(1)\n```", "print(1)\n", "python"),
        ("First:\n```\nold\n```\nBetter:\n```C++\nnew\nlines\n```\nDone.", "new\nlines\n", "c++"),
        ("  ```py\n  x\n  ```", "  x\n", "py"),
        # The last block was cut off; the one before is whole.
        ("```\nwhole\n```\n```\ncut", "whole\n", ""),
        # A fence that names a language begins a block.
        ("```python\nnever closed\n```python\nclosed\n```", "closed\n", "python"),
        ("```python\n```", "\n", "python"),
    ],
)
def test_the_last_complete_block_is_the_program(answer: str, source: str, tag: str) -> None:
    assert program_in(answer) == AnsweredProgram(source, tag)


@pytest.mark.parametrize("answer", ["", "print(1)", "```python\nprint(1)", "`print(1)`"])
def test_an_answer_without_a_complete_block_has_no_program(answer: str) -> None:
    assert program_in(answer) is None


def test_a_bare_answer_is_the_program_where_that_is_allowed() -> None:
    assert program_in("print(1)", unfenced=True) == AnsweredProgram("print(1)\n", "")
    assert program_in("```\ncut", unfenced=True) is None
    assert program_in("  \n", unfenced=True) is None


@pytest.mark.parametrize(
    ("tag", "language"), [("", "cpp"), ("c++", "cpp"), ("cpp title=a", "cpp"), ("python3", "python"), ("java", None)]
)
def test_a_fence_names_a_language_or_means_the_first(tag: str, language: str | None) -> None:
    assert language_of(tag, {"cpp": TOOLCHAINS["cpp"], "python": TOOLCHAINS["python"]}) == language
