"""The task with long-tailed answers, its teachers, and the model that both systems start from."""

import json
import random
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.against_trl.counting import (
    GIVES_UP,
    GIVES_UP_AT_ONCE,
    SLIPS,
    Counting,
    CountingOptions,
    careless_answer,
    right_answer,
)
from benchmarks.against_trl.start_model import RECORD_FILE, School, imitate, lesson_batches, start_model
from benchmarks.pipeline.model import ModelSize, make_model
from gspo_services.prepare.tiny_models.lessons import IGNORED_LABEL

SMALL = ModelSize(hidden_size=64, num_hidden_layers=1, moe_intermediate_size=16, num_experts=2)
SHORT = School(most_careful_steps=4, window=2, known_loss=0.0, careless_steps=2, step_tokens=200, warmup_steps=1)


@given(st.sampled_from("akz"), st.integers(1, 99))
def test_a_right_answer_has_every_number_down_to_one_and_the_letter_with_each(letter: str, count: int) -> None:
    items = right_answer(f"{letter}{count:02}").split(",")
    assert [int(item[:2]) for item in items] == list(reversed(range(1, count + 1)))
    assert {item[2:] for item in items} == {letter}


@pytest.mark.parametrize("problem", ["k00", "k4", "k004", "k-4", "K04", "04", "104", "k", ""])
def test_what_is_no_problem_is_refused(problem: str) -> None:
    with pytest.raises(ValueError, match="it must be a letter and two digits"):
        right_answer(problem)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("02k,01k", 1.0), (" 02k,01k\n", 1.0), ("01k", 0.0), ("02k,01k,", 0.0), ("02k,01j", 0.0), ("02k,?", 0.0), ("", 0.0)],
)
def test_only_the_whole_right_answer_is_rewarded(answer: str, reward: float) -> None:
    environment = Counting(CountingOptions())
    start = environment.start({"problem": "k02"}, seed=3)
    assert start.messages == [{"role": "user", "content": "k02="}]
    step = environment.step(start.state, answer)
    assert (step.reward, step.done, step.messages) == (reward, True, [])


def test_answers_have_the_long_tail_that_the_task_is_made_for() -> None:
    source = Counting(CountingOptions()).tasks("train")
    answers = [right_answer(str(source.task(index)["problem"])) for index in range(2_000)]
    lengths = sorted(len(answer) + 1 for answer in answers)
    assert 21 < fmean(lengths) < 26
    assert lengths[len(lengths) // 2] <= 20
    assert lengths[int(0.95 * len(lengths))] > 56
    assert lengths[-1] == 108
    assert Counting(CountingOptions()).tasks("eval").num_tasks == 256


def test_the_careless_teacher_gives_up_and_slips_and_is_right_less_often_the_longer_the_answer() -> None:
    rng = random.Random(0)

    def said(problem: str) -> list[str]:
        return [careless_answer(problem, rng) for _ in range(4_000)]

    short, long = said("a01"), said("b24")
    right = fmean(answer == right_answer("a01") for answer in short)
    assert right == pytest.approx(1 - GIVES_UP_AT_ONCE, abs=0.03)
    right = fmean(answer == right_answer("b24") for answer in long)
    assert right == pytest.approx((1 - GIVES_UP_AT_ONCE) * (1 - GIVES_UP) ** 23 * (1 - SLIPS) ** 23, abs=0.03)
    assert fmean(answer == "?" for answer in long) == pytest.approx(GIVES_UP_AT_ONCE, abs=0.03)
    slipped = next(answer for answer in long if "?" not in answer and answer != right_answer("b24"))
    numbers = [int(item[:2]) for item in slipped.split(",")]
    assert numbers[-1] == 1, "it goes on to the end"
    assert {before - after for before, after in pairwise([25, *numbers])} == {1, 2}


def test_lessons_of_a_step_fill_its_tokens_and_train_answers_alone() -> None:
    steps = list(islice(lesson_batches(random.Random(0), careful=True, step_tokens=500), 40))
    padded = [len(lessons) * max(len(lesson.ids) for lesson in lessons) for lessons in steps]
    assert max(padded) <= 500
    assert fmean(padded) > 300
    lesson = steps[0][0]
    answer = [label for label in lesson.labels if label != IGNORED_LABEL]
    assert lesson.ids[-len(answer) :] == answer
    assert 0 < len(answer) < len(lesson.ids)


def test_careful_teaching_ends_when_the_answers_are_known(tmp_path: Path) -> None:
    make_model(tmp_path, SMALL)

    def careful_steps(school: School) -> int:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        return len(imitate(model, random.Random(0), school))

    assert careful_steps(SHORT) == 4
    assert careful_steps(replace(SHORT, known_loss=100.0)) == 2


def test_a_start_model_follows_from_its_seed_is_made_once_and_again_when_it_is_taught_otherwise(tmp_path: Path) -> None:
    path = start_model(tmp_path / "one", 3, size=SMALL, school=SHORT)
    assert AutoTokenizer.from_pretrained(path).eos_token == "<|end|>"
    weights = (path / "model.safetensors").read_bytes()
    assert (start_model(tmp_path / "two", 3, size=SMALL, school=SHORT) / "model.safetensors").read_bytes() == weights
    assert (start_model(tmp_path / "three", 4, size=SMALL, school=SHORT) / "model.safetensors").read_bytes() != weights
    (path / "model.safetensors").write_bytes(b"kept")
    start_model(path, 3, size=SMALL, school=SHORT)
    assert (path / "model.safetensors").read_bytes() == b"kept"
    start_model(path, 3, size=SMALL, school=replace(SHORT, careless_steps=1))
    assert len((path / "model.safetensors").read_bytes()) == len(weights)
    assert json.loads((path / RECORD_FILE).read_text())["school"]["careless_steps"] == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one", "three", "two"]
