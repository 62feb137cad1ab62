"""Options and passages are shown, and every column of a row is accounted for."""

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.tasks.environments import Environment, RewardJob
from gspo.tasks.grading import grade_answer
from gspo_services.tasks.environments import ColumnUse, MixedTasks, create_environment, questions_said_again
from tests.support.files.question_forms import FORMS, MIXED


def loaded(rows: list[Any], folder: Path, name: str = "dataset", **options: Any) -> tuple[Environment, MixedTasks]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    environment = create_environment(name, {"train_path": str(path), **options})
    tasks = environment.tasks("train")
    assert isinstance(tasks, MixedTasks)
    return environment, tasks


def asked(environment: Environment, tasks: MixedTasks, index: int = 0) -> str:
    return str(environment.start(tasks.task(index), 0).messages[-1]["content"])


def graded(environment: Environment, tasks: MixedTasks, said: str, index: int = 0) -> float:
    job = environment.step(environment.start(tasks.task(index), 0).state, f"So it is \\boxed{{{said}}}.").reward
    assert isinstance(job, RewardJob)
    return grade_answer(**job.arguments)["right"]


def use_of(tasks: MixedTasks) -> ColumnUse:
    (use,) = tasks.columns
    return use


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", ["dataset", "math"])
def test_a_form_is_asked_whole_and_graded_right(name: str, kind: str, tmp_path: Path) -> None:
    form = FORMS[name]
    environment, tasks = loaded([form.row], tmp_path, kind)
    assert asked(environment, tasks) == form.asked
    assert {said: graded(environment, tasks, said) for said in form.right} == dict.fromkeys(form.right, 1.0)
    assert {said: graded(environment, tasks, said) for said in form.wrong} == dict.fromkeys(form.wrong, 0.0)
    use = use_of(tasks)
    assert tuple(use.left_out) == form.left_out
    assert {*use.shown, *use.gold, *use.metadata, *use.left_out} == {*form.row}


@pytest.mark.parametrize("name", MIXED)
def test_the_right_option_is_at_no_place_of_its_own(name: str, tmp_path: Path) -> None:
    texts = ("Jupiter", "Mars", "Venus", "Earth")
    rows = [
        json.loads(json.dumps(MIXED[name]).replace("Largest?", f"{place}?").replace("Earth", f"Earth {place}"))
        for place in range(40)
    ]
    environment, tasks = loaded(rows, tmp_path)
    letters = {str(tasks.task(place)["answer"]) for place in range(40)}
    assert letters == {*"ABCD"}
    shown = asked(environment, tasks)
    assert all(text in shown for text in texts)
    letter = str(tasks.task(0)["answer"])
    assert f"{letter}. Jupiter" in shown
    assert [graded(environment, tasks, said) for said in (letter, "Jupiter", "Mars", "Earth 0")] == [1.0, 1.0, 0.0, 0.0]
    again, same = loaded(rows, tmp_path)
    assert asked(again, same) == shown


def test_rows_may_have_different_numbers_of_options(tmp_path: Path) -> None:
    rows = [
        {"question": f"{number}?", "options": [f"o{place}" for place in range(number)], "answer": "B"} for number in (2, 10)
    ]
    environment, tasks = loaded(rows, tmp_path)
    assert [asked(environment, tasks, place).count("\n") for place in range(2)] == [3, 11]
    assert (
        environment.start(tasks.task(0), 0)
        .messages[0]["content"]
        .endswith("the letter of the right option within \\boxed{}.")
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "?", "choices": ["a", "b"], "answer": 2}, "none of the options (A: a, B: b); counted from 0"),
        ({"question": "?", "choices": ["a", "b"], "answer": "C"}, 'column "answer" is \'C\', which is none of the options'),
        ({"question": "?", "choices": ["a", "a"], "answer": "A"}, "two options in choices are the same"),
        ({"question": "?", "choices": ["a"], "answer": "A"}, "choices has 1 options: expected 2 to 26"),
        ({"question": "?", "choices": ["1", "2", "3"], "answer": "1"}, "could be two of the options"),
        ({"question": "?", "choices": "a or b", "answer": "a"}, '"choices" is \'a or b\': expected a list of options'),
        ({"question": "?", "options": ["a", "b"], "answer": "A", "label": 1}, "label and answer name different options"),
        ({"question": "?", "context": {"of": 1}, "answer": "A"}, "name the columns that are shown in context_columns"),
    ],
)  # fmt: skip
def test_options_that_could_mean_two_things_are_refused(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        loaded([row], tmp_path)
    assert says in str(refused.value)


def test_numbers_among_options_are_places_as_mmlu_has_them(tmp_path: Path) -> None:
    environment, tasks = loaded([{"question": "2+2?", "choices": ["2", "3", "4"], "answer": 2}], tmp_path)
    assert [graded(environment, tasks, said) for said in ("C", "4", "2", "3")] == [1.0, 1.0, 0.0, 0.0]


def test_a_prompt_that_lists_its_options_is_asked_as_it_is(tmp_path: Path) -> None:
    prompt = "Which?\n(A) Mars\n(B) Jupiter"
    row = {"prompt": prompt, "choices": ["Mars", "Jupiter"], "answer": "B"}
    environment, tasks = loaded([row], tmp_path)
    assert asked(environment, tasks) == prompt
    assert [graded(environment, tasks, said) for said in ("B", "Jupiter", "A")] == [1.0, 1.0, 0.0]
    environment, tasks = loaded([{"question": "3+1=?", "options": ["3", "4"], "answer": "B"}], tmp_path)
    assert asked(environment, tasks) == "3+1=?\n\nA. 3\nB. 4"


def test_of_a_conversation_the_last_question_has_passage_and_options(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which?"}]
    row = {"prompt": messages, "choices": ["Mars", "Jupiter"], "context": "Planets.", "answer": 1}
    environment, tasks = loaded([row], tmp_path)
    shown = environment.start(tasks.task(0), 0).messages
    assert shown == [messages[0], {"role": "user", "content": "Planets.\n\nWhich?\n\nA. Mars\nB. Jupiter"}]


def test_options_and_passages_can_be_named_and_left_out(tmp_path: Path) -> None:
    row = {"question": "Q?", "context": "C.", "picks": ["a", "b"], "facts": "F.", "answer": "b"}
    environment, tasks = loaded([row], tmp_path, choices_column="picks", context_columns=["facts"])
    assert asked(environment, tasks) == "F.\n\nQ?\n\nA. a\nB. b"
    assert use_of(tasks).suspicious == ["context"]
    environment, tasks = loaded([row], tmp_path, choices_column="", context_columns=[])
    assert asked(environment, tasks) == "Q?"
    assert str(use_of(tasks)) == "shown: question; gold: answer; left out: context, picks, facts"
    assert use_of(tasks).suspicious == ["context", "facts"]
    for option, value in (("choices_column", "no"), ("context_columns", ["no"])):
        with pytest.raises(ValueError, match=f'no column "no".*{option}'):
            loaded([row], tmp_path, **{option: value})


def test_a_column_that_is_always_empty_is_not_named(tmp_path: Path) -> None:
    rows = [{"question": f"{place}?", "image": None, "context": "", "answer": "1", "note": "x"} for place in range(3)]
    assert str(use_of(loaded(rows, tmp_path)[1])) == "shown: question; gold: answer; left out: note"
    rows[2]["image"] = "cGljdHVyZQ=="
    assert use_of(loaded(rows, tmp_path)[1]).suspicious == ["image"]


def test_a_reward_of_ones_own_gets_the_letter_and_the_options(tmp_path: Path) -> None:
    row = {"question": "Q?", "choices": ["a", "b"], "answer": 1}
    environment, tasks = loaded([row], tmp_path, reward="m:f")
    assert tasks.task(0) == {"prompt": "Q?\n\nA. a\nB. b", "answer": "B", "options": ["a", "b"]}
    environment, tasks = loaded([row | {"answer": "none"}], tmp_path, reward="m:f")
    assert asked(environment, tasks) == "Q?\n\nA. a\nB. b"


def test_votes_for_an_option_are_one_vote(tmp_path: Path) -> None:
    environment, tasks = loaded([FORMS["MMLU"].row], tmp_path)
    said = ("B", "(B)", "Jupiter", "B. Jupiter")
    assert {environment.answer(tasks.task(0), f"\\boxed{{{each}}}") for each in said} == {"B"}


TAGS = "Using the numbers [44, 19, 35], make 98. Return it in <answer> </answer> tags, as <answer> (1 + 2) / 3 </answer>."


@pytest.mark.parametrize("kind", ["dataset", "math"])
def test_a_prompt_of_tinyzero_has_its_answer_between_tags(kind: str, tmp_path: Path) -> None:
    truth = {"ground_truth": {"numbers": [44, 19, 35], "target": 98}, "style": "rule"}
    row = {"data_source": "countdown", "prompt": [{"role": "user", "content": TAGS}], "reward_model": truth}
    environment, tasks = loaded([row], tmp_path, kind)
    assert environment.start(tasks.task(0), 0).messages == row["prompt"]
    said = {"<think>44+19</think>\n<answer> (44 + 19) + 35 </answer>": 1.0, "<answer>\n44+19+35\n</answer> Yes.": 1.0,
            "<answer> 98 </answer>": 0.0, "<answer>44+19+36</answer>": 0.0, "44+19+34": 0.0}  # fmt: skip
    for text, reward in said.items():
        job = environment.step(environment.start(tasks.task(0), 0).state, text).reward
        assert isinstance(job, RewardJob)
        assert grade_answer(**job.arguments)["right"] == reward, text


def test_columns_without_end_are_counted_and_not_listed(tmp_path: Path) -> None:
    rows = [
        {"question": f"{place}?", "answer": "1", **{f"c{place}_{number}": 1 for number in range(600)}} for place in range(4)
    ]
    use = use_of(loaded(rows, tmp_path)[1])
    assert len(use.left_out) == 1_200
    assert str(use).endswith(", c0_39 and 1,160 more")


def test_options_are_options_whatever_the_kind_of_other_golds(tmp_path: Path) -> None:
    row = {"question": "What is 2+2?", "choices": ["3", "4"], "answer": 1}
    environment, tasks = loaded([row], tmp_path, kind="number")
    assert graded(environment, tasks, "B") == 1.0
    assert questions_said_again(tasks, "number", 10) == []
