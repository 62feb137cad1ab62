"""``gspo init``: whatever is asked for fits together, writes over nothing, and passes ``gspo check``."""

import io
import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.tasks.environments import RewardJob
from gspo.tasks.grading import grade_answer
from gspo_services.prepare.check.command import main as check
from gspo_services.prepare.init.choices import KINDS, PLACES
from gspo_services.prepare.init.command import _parser, answers_of, main
from gspo_services.prepare.init.plan import size_in_name
from gspo_services.prepare.init.project import make_project, write_project
from gspo_services.shared.placement import Machine, placement_of
from gspo_services.shared.runtime.errors import ConfigurationError
from gspo_services.shared.settings import load_settings
from gspo_services.tasks.environments import create_environment, create_task_set
from tests.support.checking.projects import write_weights
from tests.support.checking.shapes import QWEN3_06B, QWEN3_8B, QWEN3_30B, TINY
from tests.support.files.public_forms import FORMS, NUM_ROWS


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deploy").symlink_to(Path(__file__).parents[5] / "deploy")


def model(folder: Path, config: dict[str, Any]) -> str:
    """A model's directory with config.json and the headers of weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def rows(path: Path, number: int, prompt: str = "question", answer: str = "answer") -> Path:
    path.write_text("".join(json.dumps({prompt: f"{index}?" * 5, answer: str(index)}) + "\n" for index in range(number)))
    return path


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_on_every_hardware_is_a_sound_configuration(
    kind: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = model(tmp_path / "m", QWEN3_06B if place != "laptop" else TINY)
    assert main(["p", "--kind", kind, "--hardware", place, "--model", known]) == 0
    assert "gspo check run.toml" in capsys.readouterr().out
    settings = load_settings(Path("p/run.toml"), (), {})
    assert settings.sampling.max_turn_tokens < settings.sampling.max_tokens <= settings.learner.max_tokens_per_micro_batch
    assert settings.model.dtype == settings.learner.dtype == ("float32" if place == "laptop" else "bfloat16")
    named = [] if place == "laptop" else ["--gpu", "H100", "--gpus", "1" if place == "gpu" else "8"]
    status = check(["p/run.toml", "--no-code", "--elsewhere", "--json", *named])
    findings = json.loads(capsys.readouterr().out)["findings"]
    # What concerns the values alone: there is no complaint about any of them.
    complaints = {finding["check"] for finding in findings if finding["status"] in ("warn", "fail")}
    assert (status, complaints - {"lag"}) == (0, set())
    assert not [finding for finding in findings if finding["check"] == "unused"]


def test_the_files_of_each_kind_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with_rows = {"run.toml", "data/train.jsonl", "data/eval.jsonl"}
    expected = {
        "reward": with_rows | {"my_reward.py"},
        "agent": with_rows | {"my_agent.py"},
        "environment": {"run.toml", "my_environment.py"},
        "maths": with_rows,
        "code": with_rows,
        "reasoning_gym": {"run.toml"},
    }
    for kind, files in expected.items():
        assert main([kind, "--kind", kind]) == 0
        assert {str(path.relative_to(kind)) for path in Path(kind).rglob("*") if path.is_file()} == files
        for path in Path(kind).glob("*.py"):
            compile(path.read_text(), path.name, "exec")
    assert "gspo model tiny models/tiny" in capsys.readouterr().out


def test_nothing_is_written_over_and_nothing_is_left_of_an_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p").mkdir()
    Path("p/my_reward.py").write_text("mine")
    assert main(["p"]) == 2
    said = capsys.readouterr()
    assert "p has my_reward.py already" in said.err
    assert "choose another directory" in said.err
    assert [path.name for path in Path("p").iterdir()] == ["my_reward.py"]
    assert Path("p/my_reward.py").read_text() == "mine"


def test_a_directory_that_cannot_be_written_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("p").mkdir()
    Path("p/data").write_text("a file where a folder must be")
    assert main(["p"]) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert [path.name for path in Path("p").iterdir()] == ["data"]
    assert main(["p/data/deeper"]) == 2


def test_rows_of_ones_own_are_split_and_their_columns_found(tmp_path: Path) -> None:
    rows(tmp_path / "mine.jsonl", 100, "problem", "solution")
    assert main(["p", "--data", "mine.jsonl"]) == 0
    options = tomllib.loads(Path("p/run.toml").read_text())["environment"]["options"]
    assert (options["prompt_column"], options["answer_column"]) == ("problem", "solution")
    train, held_out = (
        [json.loads(line) for line in Path(f"p/data/{name}.jsonl").read_text().splitlines()] for name in ("train", "eval")
    )
    assert (len(train), len(held_out)) == (90, 10)
    assert not {row["problem"] for row in train} & {row["problem"] for row in held_out}
    assert load_settings(Path("p/run.toml"), (), {}).evaluation.num_tasks == 10


@pytest.mark.parametrize("shape", ["laptop", "gpu"])
@pytest.mark.parametrize(
    ("answers", "marker", "gold"),
    [
        (["4\\pi", "\\text{Evelyn}", "$\\frac{1}{2}$"], "", "\\text{Evelyn}"),
        (["so #### 7", "#### 8", "it is #### 9"], "####", "8"),
        (["so $\\boxed{7}$.", "$\\boxed{8}$", "9"], "", "8"),
    ],
)
def test_a_project_of_mathematics_pays_for_what_its_rows_say(
    answers: list[str], marker: str, gold: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"problem": f"P{place}", "answer": answer}) for place, answer in enumerate(answers)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    known = model(tmp_path / "m", TINY if shape == "laptop" else QWEN3_06B)
    words = [
        "p",
        "--kind",
        "maths",
        "--hardware",
        shape,
        "--model",
        known,
        "--data",
        "mine.jsonl",
        "--eval-data",
        "mine.jsonl",
    ]
    assert main(words) == 0
    options = tomllib.loads(Path("p/run.toml").read_text())["environment"]["options"]
    assert options["system_prompt"] == ("auto" if shape == "gpu" else "")
    longest = max(len(f"\\boxed{{{answer.rpartition('#### ')[2]}}}") for answer in answers)
    assert load_settings(Path("p/run.toml"), (), {}).sampling.max_turn_tokens >= longest
    monkeypatch.chdir("p")
    environment = create_environment("dataset", options)
    source = environment.tasks("train")
    assert (source.task(1)["answer"], source.task(1).get("answer_marker", "")) == (gold, marker)
    for index in range(3):
        task = source.task(index)
        job = environment.step(environment.start(task, 0).state, f"It is $\\boxed{{{task['answer']}}}$.").reward
        assert isinstance(job, RewardJob)
        graded: Any = grade_answer(**job.arguments)  # type: ignore[arg-type]
        assert graded["right"] == 1.0


def test_files_of_ones_own_for_both_splits_are_named_and_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows(tmp_path / "a.jsonl", 10)
    rows(tmp_path / "b.jsonl", 4)
    monkeypatch.setenv("HOME", str(tmp_path))
    # A shell leaves the ~ of --data=~/a.jsonl as it is.
    assert main(["p", "--data=~/a.jsonl", "--eval-data", "$HOME/b.jsonl"]) == 0
    options = tomllib.loads(Path("p/run.toml").read_text())["environment"]["options"]
    assert (options["train_path"], options["eval_path"]) == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert not Path("p/data").exists()
    # Ten rows are no batch of 32 groups.
    assert load_settings(Path("p/run.toml"), (), {}).batch.groups_per_batch == 8


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", ["reward", "agent", "maths"])
def test_rows_as_they_are_published_make_a_project(kind: str, name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    data = form.written(tmp_path / "theirs")
    assert main(["p", "--kind", kind, "--data", str(data)]) == 0
    environment = load_settings(Path("p/run.toml"), (), {}).environment
    create = create_task_set if kind == "agent" else create_environment
    found = [create(environment.name, environment.options).tasks(split).num_tasks for split in ("train", "eval")]
    assert found == [NUM_ROWS - 1, 1], "a row that is there three times is one task, and not held out as well"


def test_a_folder_with_both_splits_is_named_and_not_copied(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows(tmp_path / "set" / "train-00000-of-00001.jsonl", 10)
    rows(tmp_path / "set" / "test-00000-of-00001.jsonl", 4)
    assert main(["p", "--data", "set"]) == 0
    options = tomllib.loads(Path("p/run.toml").read_text())["environment"]["options"]
    assert (options["train_path"], options["eval_path"]) == (str(tmp_path / "set"), str(tmp_path / "set"))
    assert load_settings(Path("p/run.toml"), (), {}).evaluation.num_tasks == 4


@pytest.mark.parametrize(
    ("row", "task"),
    [
        (FORMS["verl GSM8K"].row(0), "7"),
        (FORMS["OpenAI chat"].row(0), "7"),
        (FORMS["TRL standard"].row(0), "7"),
        ({"conversations": [{"from": "human", "value": "0+7="}, {"from": "gpt", "value": "7"}]}, "7"),
    ],
)
def test_an_agent_reaches_question_and_answer_wherever_they_are(row: Any, task: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") + json.dumps(row | {"more": 1}) + "\n")
    assert main(["p", "--kind", "agent", "--data", "a.jsonl"]) == 0
    code = Path("p/my_agent.py").read_text()
    found = {line.partition(" = ")[0].strip(): line.partition(" = ")[2] for line in code.splitlines()}
    episode = SimpleNamespace(task=row)
    messages = eval(found["messages"], {"episode": episode})
    assert [message["role"] for message in messages] == ["user"]
    assert "0+7" in messages[0]["content"]
    answer = code.partition("== str(")[2].partition(").strip()")[0]
    assert str(eval(answer, {"episode": episode})) == task


def test_long_prompts_have_room(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(
        "".join(json.dumps({"prompt": "word " * 3000, "answer": str(n)}) + "\n" for n in range(4))
    )
    assert main(["p", "--data", "long.jsonl", "--hardware", "gpu", "--model", model(tmp_path / "m", QWEN3_06B)]) == 0
    sampling = load_settings(Path("p/run.toml"), (), {}).sampling
    assert sampling.max_tokens - sampling.max_turn_tokens >= 5000


@pytest.mark.parametrize(
    ("content", "words", "part"),
    [
        (b"", (), "has no row"),
        (b"{\n", (), "line 1: not JSON"),
        (b"\xff\xfe\n", (), "is UTF-16: save it as UTF-8"),
        (b"[1]\n", (), "line 1: a JSON object is needed, found list"),
        (b'{"a": 1}\n{"a": 2}\n', (), "there are a (--prompt-column says which to use)"),
        (b'{"prompt": "1"}\n{"x": 1}\n', (), "line 2: no column question or"),
        (b'{"prompt": "1"}\n{"problem": "1"}\n', (), "line 2: it is laid out as question (problem), and the rows before"),
        (b'{"prompt": "1"}\n', (), "1 row: give at least two"),
        (b'{"prompt": "1"}\n{"prompt": "2"}\n', ("--kind", "maths"), "(--answer-column says which to use)"),
    ],
)
def test_rows_that_cannot_be_used_are_named(
    content: bytes, words: tuple[str, ...], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    assert main(["p", "--data", "bad.jsonl", *words]) == 2
    assert part in capsys.readouterr().err
    assert not Path("p").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--data", "nowhere.jsonl"), "--data: there is no file or folder /"),
        (("--data", __file__, "--eval-data", "gone.jsonl"), "--eval-data: there is no file or folder /"),
        (("--eval-data", "x.jsonl"), "--data is not"),
        (("--kind", "environment", "--data", "x.jsonl"), "tasks of its own"),
        (("--kind", "reasoning_gym", "--data", "x.jsonl"), "--kind reasoning_gym has tasks of its own"),
        (("--hardware", "gpu", "--gpu", "GTX"), "use one of A100"),
        (("--hardware", "node", "--gpus", "1"), "needs 2 at least"),
    ],
)
def test_words_that_do_not_go_together_are_refused(
    words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["p", *words]) == 2
    assert part in capsys.readouterr().err
    assert not Path("p").exists()


def test_a_model_that_does_not_fit_is_refused_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = model(tmp_path / "m", QWEN3_30B)
    assert main(["p", "--hardware", "gpu", "--gpu", "4090", "--model", known]) == 2
    assert "--hardware node --gpus N" in capsys.readouterr().err


def test_on_two_gpus_one_trains_with_offload_and_the_other_generates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = model(tmp_path / "m", QWEN3_8B)
    assert main(["p", "--hardware", "node", "--gpus", "2", "--gpu", "H100", "--model", known]) == 0
    settings = load_settings(Path("p/run.toml"), (), {})
    assert (settings.learner.num_ranks, settings.learner.offload) == (1, "optimizer")
    assert "gspo run run.toml" in capsys.readouterr().out
    placement = placement_of(settings, Machine(gpus=("0", "1"), cores=tuple(range(8))))
    assert (placement.learner.gpus, [place.gpus for place in placement.rollouts]) == (("0",), [("1",)])


class Person:
    """Types these lines, and then nothing."""

    def __init__(self, *lines: str) -> None:
        self.typed = iter(lines)
        self.asked: list[str] = []

    def __call__(self, question: str) -> str:
        self.asked.append(question)
        try:
            return next(self.typed)
        except StopIteration:
            raise EOFError from None


def test_a_person_is_asked_for_what_is_left_open() -> None:
    person, told = Person("3", "nowhere", "node", "x", "4", "", ""), list[str]()
    answers = answers_of(_parser().parse_args(["p"]), person, told.append)
    assert (answers.kind, answers.place, answers.num_gpus, answers.gpu_name) == ("environment", "node", 4, "H100")
    assert answers.model == "hf://Qwen/Qwen3-8B"
    assert "'nowhere' is none of them: type a name or a number" in told
    assert "'x' is no number from 1 up" in told


def test_a_person_is_asked_again_with_the_reason_until_the_answer_can_be_taken(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(b'question,answer\n"a ""b"",\nc",1\ncaf\xe9,2\n')
    (tmp_path / "good.csv").write_bytes(b'question,answer\n"a ""b"",\nc",1\nd,2\n')
    person, told = Person("maths", "gpu", "T1000", "H100", "", "gone.csv", "latin.csv", "good.csv"), list[str]()
    answers = answers_of(_parser().parse_args(["p"]), person, told.append)
    assert (answers.gpu_name, answers.data, answers.hub_name) == ("H100", Path("good.csv"), "Qwen/Qwen3-0.6B")
    for reason in ("'T1000': use one of", "no file or folder", "byte 0xe9 is not UTF-8"):
        assert [reason in each for each in told].count(True) == 1


@pytest.mark.parametrize("name", ["org/Some-1B", "hf://org/Some-1B"])
def test_a_name_of_the_hub_is_fetched_by_the_commands_that_read_the_configuration(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["p", "--model", name, "--hardware", "gpu"]) == 0
    assert tomllib.loads(Path("p/run.toml").read_text())["model"]["path"] == "hf://org/Some-1B"
    assert "put the model" not in capsys.readouterr().out
    assert main(["q", "--model", "hf://datasets/openai/gsm8k"]) == 2
    assert "is a data set" in capsys.readouterr().err


def test_programs_are_read_by_their_rows_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = [{"input": "1\n", "output": "2\n"}]
    problems = [{"prompt": f"Add {index}.", "tests": tests} for index in range(20)]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in problems))
    assert main(["p", "--kind", "code", "--data", str(file)]) == 0
    settings = load_settings(Path("p/run.toml"), (), {})
    assert (settings.environment.name, settings.evaluation.num_tasks) == ("code", 2)
    file.write_text(json.dumps({"prompt": "Add.", "tests": []}) + "\n")
    assert main(["q", "--kind", "code", "--data", str(file)]) == 2
    assert "line 1: it has no tests" in capsys.readouterr().err


def test_the_tiny_model_of_programs_is_made_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["p", "--kind", "code", "--defaults"]) == 0
    assert "gspo model tiny models/programs --programs" in capsys.readouterr().out
    assert load_settings(Path("p/run.toml"), (), {}).sampling.max_turn_tokens == 48


def test_adapters_and_a_teacher_are_set_with_a_rate_that_suits_them(tmp_path: Path) -> None:
    teacher = model(tmp_path / "t", QWEN3_8B)
    assert main(["p", "--lora", "16", "--teacher", teacher, "--model", "org/Some-1B", "--hardware", "gpu"]) == 0
    assert main(["q", "--teacher", "http://teacher:30000"]) == 0
    with_both, taught = (load_settings(Path(name) / "run.toml", (), {}) for name in "pq")
    assert (with_both.lora.rank, with_both.learner.learning_rate) == (16, 5e-6)
    assert (with_both.distillation.directory, taught.distillation.url) == (teacher, "http://teacher:30000")
    assert (taught.lora.rank, taught.learner.learning_rate) == (0, 2e-4)


def test_a_person_who_leaves_gets_nothing_written() -> None:
    with pytest.raises(EOFError):
        answers_of(_parser().parse_args(["p"]), Person("1"), lambda text: None)


def test_without_a_terminal_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["p"]) == 0
    assert load_settings(Path("p/run.toml"), (), {}).model.path == Path("p/models/tiny")


def test_a_model_that_is_here_is_found_from_the_project(tmp_path: Path) -> None:
    model(tmp_path / "models" / "small", TINY)
    assert main(["p", "--model", "models/small"]) == 0
    assert load_settings(Path("p/run.toml"), (), {}).model.path == tmp_path / "models" / "small"


def test_odd_names_are_quoted_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = model(tmp_path / 'a "b" \\ \x7f', TINY)
    write_weights(Path(odd) / "model.safetensors", 256_384)
    assert main(["p q", "--model", odd]) == 0
    assert load_settings(Path("p q/run.toml"), (), {}).model.path == Path(odd)
    assert "cd 'p q'" in capsys.readouterr().out
    answers = answers_of(_parser().parse_args(["r", "--model", "m\udc80"]), None, lambda text: None)
    with pytest.raises(ConfigurationError, match="not text in UTF-8"):
        write_project(make_project(answers, tmp_path))


@pytest.mark.parametrize(
    ("name", "size"),
    [("Qwen3-0.6B", 0.6e9), ("/models/Qwen3-30B-A3B", 30e9), ("llama-3.1-8b-instruct", 8e9), ("models/mine", None)],
)
def test_a_name_tells_the_size(name: str, size: float | None) -> None:
    assert size_in_name(name) == size
