"""The program in an answer."""

import pytest

from gspo_services.tasks.environments.programs import TOOLCHAINS, AnsweredProgram, language_of, program_in

BOTH = {"python": TOOLCHAINS["python"], "cpp": TOOLCHAINS["cpp"]}
RIGHT = "```python\nright\n```\n"


def found(answer: str, *, unfenced: bool = False) -> tuple[str, str] | None:
    program = program_in(answer, BOTH, unfenced=unfenced)
    return None if program is None else (program.source, program.language)


@pytest.mark.parametrize(
    ("answer", "source", "language"),
    [
        ("```python\nprint(1)\n```", "print(1)\n", "python"),
        ("First:\n```\nold\n```\nBetter:\n```C++\nnew\nlines\n```\nDone.", "new\nlines\n", "cpp"),
        # The last block was cut off; the one before is whole.
        ("```\nwhole\n```\n```\ncut", "whole\n", "python"),
        # A fence that names a language begins a block.
        ("```python\nnever closed\n```python\nclosed\n```", "closed\n", "python"),
        ("```python\n```", "\n", "python"),
        # In a list it stands further to the right.
        ("1. So:\n   ```py\n   if x:\n       y\n\n  z\n   ```", "if x:\n    y\n\nz\n", "python"),
        ("~~~python\nprint(1)\n~~~", "print(1)\n", "python"),
        ("~~~python\ns = '''\n```\n'''\n~~~", "s = '''\n```\n'''\n", "python"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''\n", "python"),
        ("```Python 3\nx\n```", "x\n", "python"),
        ("```{.python .numberLines}\nx\n```", "x\n", "python"),
        ("Use ```x``` here:\n```python\nx\n```", "x\n", "python"),
        ("```inline``` code\n```python\nx\n```", "x\n", "python"),
    ],
)
def test_the_last_complete_block_is_the_program(answer: str, source: str, language: str) -> None:
    assert found(answer) == (source, language)


@pytest.mark.parametrize(
    "behind",
    [
        "It prints:\n```\n3\n```",
        "It prints:\n```text\n3\n```",
        "Run it:\n```bash\npython solution.py < in\n```",
        "```java\nclass A {}\n```",
        "```python\ncut off",
        "And ``` is a fence.",
    ],
)
def test_what_stands_behind_the_program_is_not_taken_for_it(behind: str) -> None:
    assert found(RIGHT + behind) == ("right\n", "python")


def test_without_a_block_that_names_a_language_the_last_unnamed_one_is_in_the_first_language() -> None:
    assert found("```\nfirst\n```\n```\nlast\n```\n```text\nno\n```") == ("last\n", "python")
    assert program_in("```\nx\n```", {"cpp": TOOLCHAINS["cpp"]}) == AnsweredProgram("x\n", "cpp")
    assert program_in(RIGHT, {"cpp": TOOLCHAINS["cpp"]}) is None


@pytest.mark.parametrize("answer", ["", "print(1)", "```python\nprint(1)", "`print(1)`", "```bash\nls\n```"])
def test_an_answer_without_a_complete_block_has_no_program(answer: str) -> None:
    assert found(answer) is None


def test_a_thought_is_no_answer() -> None:
    draft = "```python\ndraft\n```\n"
    assert found(f"<think>\n{draft}</think>\n{RIGHT}") == ("right\n", "python")
    # Its beginning may stand in the prompt.
    assert found(f"{draft}</think>\n{RIGHT}") == ("right\n", "python")
    assert found(f"<think>\n{draft}hmm, but") is None
    assert found(f"<think>\n{draft}</think>\nSo that is it.") is None
    assert found(f"{RIGHT}<think>\n{draft}") == ("right\n", "python")
    assert found("<think>\nbare", unfenced=True) is None


def test_a_bare_answer_is_the_program_where_that_is_allowed() -> None:
    assert found("print(1)", unfenced=True) == ("print(1)\n", "python")
    assert found("```\ncut", unfenced=True) is None
    assert found("```text\nx\n```", unfenced=True) is None
    assert found("  \n", unfenced=True) is None


@pytest.mark.parametrize(
    ("tag", "language"),
    [
        ("", "cpp"),
        ("c++", "cpp"),
        ("cpp title=a", "cpp"),
        ("c++20", "cpp"),
        ("python3", "python"),
        ("java", None),
        ("c", None),
    ],
)
def test_a_fence_names_a_language_or_means_the_first(tag: str, language: str | None) -> None:
    assert language_of(tag, {"cpp": TOOLCHAINS["cpp"], "python": TOOLCHAINS["python"]}) == language
