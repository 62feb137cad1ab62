"""Rows as they are published are recognised by ``dataset`` and ``math``; what could mean two things is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.tasks.environments import Environment, RewardJob
from gspo.tasks.grading import grade_answer
from gspo_services.tasks.environments import MixedTasks, create_environment
from tests.support.files.public_forms import FORMS, NUM_ROWS, json_array, json_lines


def graded(environment: Environment, task: dict[str, Any], text: str) -> float:
    """The reward, by the function that a worker would call."""
    job = environment.step(environment.start(task, 0).state, text).reward
    assert isinstance(job, RewardJob)
    return grade_answer(**job.arguments)["right"]


def tasks_of(environment: Environment) -> MixedTasks:
    tasks = environment.tasks("train")
    assert isinstance(tasks, MixedTasks)
    return tasks


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", ["dataset", "math"])
def test_a_published_form_loads_without_options_and_is_scored_as_its_owners_do(name: str, kind: str, tmp_path: Path) -> None:
    form = FORMS[name]
    environment = create_environment(kind, {"train_path": str(form.written(tmp_path))})
    tasks = tasks_of(environment)
    assert (tasks.num_tasks, tasks.num_repeated) == (NUM_ROWS, NUM_ROWS * (form.times - 1))
    assert tasks.layouts == [form.layout]
    boxed = kind == "math" and name == "GSM8K of OpenAI"  # Its system prompt asks for a box, and the rows for nothing.
    for row, text, score in form.answers():
        said = f"\\boxed{{{text.rpartition(' ')[2]}}}" if boxed else text
        assert graded(environment, tasks.task(row), said) == score, (row, text)
    first = environment.start(tasks.task(0), 0).messages
    assert f"{name} 0: what is 0+7?" in str(first[-1]["content"])
    assert [message["role"] for message in first] in (["user"], ["system", "user"])


def refusal(rows: list[Any], tmp_path: Path, name: str = "dataset", **options: Any) -> str:
    json_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError) as refused:
        create_environment(name, {"train_path": str(tmp_path / "a.jsonl"), **options}).tasks("train")
    return str(refused.value)


def read(rows: list[Any], tmp_path: Path, name: str = "dataset", **options: Any) -> tuple[Environment, list[dict[str, Any]]]:
    json_lines(tmp_path / "a.jsonl", rows)
    environment = create_environment(name, {"train_path": str(tmp_path / "a.jsonl"), **options})
    tasks = tasks_of(environment)
    return environment, [tasks.task(index) for index in range(tasks.num_tasks)]


PLAIN = {"question": "1+1?", "answer": "2"}
CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
VERL = {"data_source": "own", "prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}
OLYMPIAD = {"question": "How far?", "context": "A car.", "final_answer": ["2"], "is_multiple_answer": False, "unit": None}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([PLAIN, CHAT], "line 2: it is laid out as chat (messages, the last message), and the row at"),
        (
            [PLAIN, {"question": "2+2?", "answer": "So\n#### 4"}],
            "line 2: it is laid out as GSM8K (question, answer), and the row",
        ),
        ([PLAIN, {"problem": "2+2?", "answer": "4"}], "put the two into sources of their own, or name the columns"),
        ([PLAIN | {"prompt": "1+1?"}], "columns question and prompt could each be the question: say in prompt_column"),
        ([PLAIN | {"ground_truth": "3"}], "columns answer and ground_truth could each be the answer: say in answer_column"),
        ([{"text": "1+1?", "answer": "2"}], "no column question or Question or problem"),
        ([{"question": "1+1?", "level": 3}], "no column answer or Answer or final_answer"),
        ([{"question": "1+1?", "solution": "We find that it is two."}], "say in gold_marker what the answer stands behind"),
        (
            [{"messages": [*CHAT["messages"][:1], {"role": "assistant", "content": "It is clearly four."}]}],
            "has no \\boxed{...}",
        ),
        ([{"messages": CHAT["messages"][:1]}], "no column answer"),
        ([{"messages": [], "answer": "1"}], "an empty conversation"),
        ([{"problem": "P", "answer": ""}], 'column "answer" is empty: the row has no answer'),
        ([{"problem": "P", "answer": []}], 'column "answer" is an empty list'),
        ([{"problem": "P", "answer": {"value": "1"}}], "not an answer"),
        (
            [VERL | {"reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": ["2"]}'}}],
            'are for the environment "code"',
        ),
        ([OLYMPIAD | {"error": "1e-2"}], "column \"error\" is '1e-2': an answer within that tolerance is right"),
        ([OLYMPIAD | {"question": "See <img_3362>."}], "it asks about an image"),
        ([OLYMPIAD | {"image_1": {"bytes": "x"}}], "it asks about an image"),
        ([OLYMPIAD | {"answer_type": "Need_human_evaluate"}], "a person judges its answer"),
        ([PLAIN, PLAIN | {"answer": "3"}], "its answer is '3', and the row at"),
        ([PLAIN, PLAIN | {"answer": ["2", "3"]}], "its answer is ['2', '3'], and the row at"),
    ],
)
def test_a_row_that_could_mean_two_things_is_named_with_the_way_out(rows: list[Any], says: str, tmp_path: Path) -> None:
    said = refusal(rows, tmp_path)
    assert says in said
    assert said.startswith(f"{tmp_path / 'a.jsonl'}, line {len(rows)}: ")
    assert 'set on_bad_row = "skip"' in said


def test_columns_that_are_named_win_over_what_would_be_recognised(tmp_path: Path) -> None:
    rows = [PLAIN | {"prompt": "3+3?", "ground_truth": "6"}, {"prompt": "4+4?", "ground_truth": "8"}]
    _, tasks = read(rows, tmp_path, prompt_column="prompt", answer_column="ground_truth")
    assert tasks == [{"prompt": "3+3?", "answer": "6"}, {"prompt": "4+4?", "answer": "8"}]


def test_a_table_of_two_layouts_whose_columns_are_empty_in_turn_is_refused(tmp_path: Path) -> None:
    said = refusal([{**PLAIN, "messages": None}, {"question": None, "answer": None, **CHAT}], tmp_path)
    assert "line 2: it is laid out as chat" in said


def test_olympiad_rows_say_what_their_judge_asks_for(tmp_path: Path) -> None:
    both = OLYMPIAD | {"question": "Which?", "final_answer": ["1", "2"], "is_multiple_answer": True}
    _, tasks = read([OLYMPIAD | {"unit": "km"}, both], tmp_path)
    assert tasks == [
        {"prompt": "A car.\nHow far?\nGive the answer in km, without the unit.", "answer": "2"},
        {"prompt": "A car.\nWhich?\nGive all answers, separated by commas.", "answer": "1, 2"},
    ]


@pytest.mark.parametrize("answer", [["2", "12"], '["2", "12"]'])
@pytest.mark.parametrize("name", ["dataset", "math"])
def test_of_a_list_of_answers_each_is_right(name: str, answer: Any, tmp_path: Path) -> None:
    environment, (task,) = read([{"question": "1+1?", "answer": answer}], tmp_path, name)
    assert task["answer"] == ["2", "12"]
    assert [graded(environment, task, text) for text in (r"\boxed{2}", r"\boxed{12}", r"\boxed{3}")] == [1.0, 1.0, 0.0]


def test_an_interval_is_no_list_of_answers(tmp_path: Path) -> None:
    _, tasks = read([{"question": "Where?", "answer": "[0, 1]"}, {"question": "And?", "answer": '["0"'}], tmp_path)
    assert [task["answer"] for task in tasks] == ["[0, 1]", '["0"']


@pytest.mark.parametrize("name", ["dataset", "math"])
def test_an_item_of_a_list_is_a_column(name: str, tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "final_answer": ["2"]}, {"question": "2+2?", "final_answer": ["4"]}]
    _, tasks = read(rows, tmp_path, name, answer_column="final_answer.0")
    assert [task["answer"] for task in tasks] == ["2", "4"]


def test_verl_rows_with_named_columns_and_a_marker_of_the_policys_alone(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "x",
            "prompt": [{"role": "user", "content": f"{i}+2?"}],
            "reward_model": {"ground_truth": str(i + 2)},
        }
        for i in (2, 3)
    ]
    options = {"answer_column": "reward_model.ground_truth", "system_prompt": ""}
    for name, more in (
        ("dataset", {"prompt_column": "prompt", "answer_marker": "Answer:"}),
        ("math", {"problem_column": "prompt", "answer_form": "marked"}),
        ("math", {"problem_column": "prompt.0.content", "answer_form": "marked"}),
    ):
        environment, tasks = read(rows, tmp_path, name, **options, **more)
        assert graded(environment, tasks[0], "2+2=5? No.\nAnswer: 4") == 1.0
        assert environment.start(tasks[0], 0).messages == [{"role": "user", "content": "2+2?"}]


NAMED = {"prompt_column": "prompt", "answer_column": "reward_model.ground_truth"}


@pytest.mark.parametrize(
    ("form", "name", "options"),
    [
        ("verl GSM8K", "dataset", NAMED),
        ("verl GSM8K", "dataset", NAMED | {"answer_marker": "####", "task_columns": ["data_source", "extra_info.index"]}),
        ("verl GSM8K", "dataset", NAMED | {"answer_marker": "", "task_columns": ["extra_info", "reward_model"]}),
        ("DAPO", "math", {"kind": "integer"}),
        ("DAPO", "math", {"kind": "integer", "answer_column": "reward_model.ground_truth", "id_column": "extra_info.index"}),
        ("OpenAI chat", "dataset", {"prompt_column": "messages.0.content", "answer_column": "messages.1.content"}),
        ("OpenAI chat", "dataset", {"prompt_column": "messages", "answer_column": "messages.1.content"}),
        ("ShareGPT", "dataset", {"prompt_column": "conversations", "answer_column": "conversations.1.value"}),
        ("TRL standard", "dataset", {"prompt_column": "prompt", "answer_column": "solution", "answer_marker": ""}),
        ("AIME of HuggingFaceH4", "math", {"kind": "integer", "task_columns": ["year"]}),
        ("AIME of Maxwell-Jia", "math", {"kind": "integer"}),
    ],
)
def test_columns_may_be_named_in_every_form(form: str, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    environment = create_environment(name, {"train_path": str(FORMS[form].written(tmp_path)), **options})
    tasks = tasks_of(environment)
    assert tasks.num_tasks == NUM_ROWS
    task = tasks.task(0)
    assert {**task, **{column: task[column] for column in options.get("task_columns", ())}} == task
    asked = environment.start(task, 0).messages[-1]
    assert (asked["role"], f"{form} 0: what is 0+7?" in str(asked["content"])) == ("user", True)
    assert [graded(environment, task, text) for text in ("#### 7\n\\boxed{7}\nAnswer: 7", "\\boxed{8}")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "marker", "system"),
    [
        (PLAIN, "", "Reason step by step, and put your final answer within \\boxed{}."),
        (
            {"question": "1+1?", "answer": "#### 2"},
            "####",
            "Solve the problem step by step. Give the final answer after ####",
        ),
        ({"question": "1+1? Put it in \\boxed{}.", "answer": "#### 2"}, "", None),
        ({"question": 'Say it after "Answer:".', "answer": "2"}, "Answer:", None),
        (
            {"question": "Q: 1+1? Answer:", "answer": "2"},
            "",
            "Reason step by step, and put your final answer within \\boxed{}.",
        ),
        (VERL | {"data_source": "aime24"}, "Answer:", "Solve the problem step by step. Give the final answer after Answer:"),
        (VERL | {"data_source": "openai/gsm8k"}, "####", "Solve the problem step by step. Give the final answer after ####"),
        (VERL, "", "Reason step by step, and put your final answer within \\boxed{}."),
        (PLAIN | {"data_source": "aime24"}, "", "Reason step by step, and put your final answer within \\boxed{}."),
    ],
)
def test_how_the_policy_is_to_answer_follows_the_row(row: Any, marker: str, system: str | None, tmp_path: Path) -> None:
    environment, (task,) = read([row], tmp_path)
    assert task.get("answer_marker", "") == marker
    first = environment.start(task, 0).messages[0]
    assert (first["content"] if first["role"] == "system" else None) == system


def test_a_reward_of_ones_own_gets_rows_without_answers_and_answers_as_they_are(tmp_path: Path) -> None:
    rows = [{"prompt": "Write a poem.", "label": 1, "target": "x"}, {"prompt": "Write it well.", "label": 0, "target": "y"}]
    _, tasks = read(rows, tmp_path, reward="m:f", task_columns=["label"])
    assert tasks == [{"prompt": "Write a poem.", "label": 1}, {"prompt": "Write it well.", "label": 0}]
    rows = [{"prompt": "P", "response": "A long text that says it."}, {"prompt": "P", "response": "Another."}]
    environment, tasks = read(rows, tmp_path, reward="m:f")
    assert [task["answer"] for task in tasks] == ["A long text that says it.", "Another."]
    assert environment.start(tasks[0], 0).messages == [{"role": "user", "content": "P"}]


def test_messages_of_openai_have_parts_and_developers(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    rows = [{"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}], "answer": "2"}]
    environment, (task,) = read(rows, tmp_path)
    assert environment.start(task, 0).messages == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}
    ]  # fmt: skip


def test_a_json_file_of_one_array_and_the_same_rows_a_line_are_the_same_tasks(tmp_path: Path) -> None:
    rows = [FORMS["ORZ"].row(i) for i in range(3)]
    json_array(tmp_path / "a.json", rows)
    json_lines(tmp_path / "b.jsonl", rows)
    read_both = [
        tasks_of(create_environment("dataset", {"train_path": str(tmp_path / name)})) for name in ("a.json", "b.jsonl")
    ]
    assert read_both[0].digest == read_both[1].digest
    assert json.dumps(read_both[0].task(2)) == json.dumps(read_both[1].task(2))
