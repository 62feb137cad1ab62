"""Calls reward functions that were written for other trainers, as those call them, and reads what they return as those do.

A job says which form its function has (``RewardJob.form``). All forms get the same: the policy's text, the task, and
for TRL's the token ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from gspo_services.tasks.worker.reward_value import COMPONENT_NAME, MAX_COMPONENTS, UnscoredError, value_of

SCORE: Final = "score"
"""The component that is the reward of verl's form; all others are only reported."""
_TURNS: Final = 2
"""``num_turns`` of a question and its answer, as verl counts."""
_ONLY_IN_TRL: Final = ("trainer_state", "environments")


class NoRewardError(Exception):
    """A function of TRL's form returned None: it has no reward for this row."""


class Form:
    """A function that takes what its job gives it."""

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the function is called with. Raises: ValueError when the task lacks something."""
        return dict(given)

    def returned(self, value: Any) -> Any:
        """The reward in what it returned. Raises: UnscoredError; NoRewardError."""
        return value


class VerlForm(Form):
    """verl's ``compute_score(data_source, solution_str, ground_truth, extra_info=None)``."""

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Form.arguments``."""
        task = given["task"]
        reward_model = task.get("reward_model")
        of_row = reward_model if isinstance(reward_model, dict) else {}
        if "ground_truth" not in of_row and "answer" not in task:
            raise ValueError(
                "the row has no reward_model.ground_truth and no answer, and verl's form needs one as ground_truth: name "
                "its column in environment.options.answer_column"
            )
        return {
            "data_source": task.get("data_source", ""),
            "solution_str": given["completion"],
            "ground_truth": of_row.get("ground_truth", task.get("answer")),
            "extra_info": {**(task.get("extra_info") or {}), "num_turns": _TURNS, "rollout_reward_scores": {}},
        }

    def returned(self, value: Any) -> Any:
        """``score`` of a dict, or the number itself. What else the dict has is reported, as far as a metric can hold it."""
        if not isinstance(value, Mapping):
            return {SCORE: value}
        if SCORE not in value:
            keys = ", ".join(f'"{str(key)[:50]}"' for key in list(value)[:MAX_COMPONENTS])
            raise UnscoredError(
                "missing_component",
                f'a function of verl\'s form returns a number or a dict with "{SCORE}"; this dict has {keys}',
            )
        reported = {name: part for name, part in value.items() if name != SCORE and _is_reportable(name, part)}
        return {SCORE: value[SCORE], **dict(list(reported.items())[: MAX_COMPONENTS - 1])}


class TrlForm(Form):
    """TRL's ``reward(prompts, completions, **columns)``: lists, here of one completion; each column of the row is one."""

    def __init__(self, *, is_chat: bool = False) -> None:
        """``is_chat``: prompts and completions are messages, also where the row's prompt is text."""
        self._is_chat = is_chat

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Form.arguments``. A row whose prompt is text has texts as prompts and completions, as in TRL."""
        task, completion = given["task"], given["completion"]
        prompt = task["prompt"]
        if self._is_chat and not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
        said = [{"role": "assistant", "content": completion}] if isinstance(prompt, list) else completion
        return {
            **{name: [value] for name, value in task.items() if name != "prompt"},
            "prompts": [prompt],
            "completions": [said],
            "completion_ids": [given["completion_ids"]],
            "log_extra": _unheard,
            "log_metric": _unheard,
        }

    def returned(self, value: Any) -> Any:
        """The one number of the list. None in it: there is no reward."""
        try:
            rewards = list(value)
        except TypeError:
            rewards = []
        if isinstance(value, (str, bytes, Mapping)) or len(rewards) != 1:
            shown = f"{len(rewards)} rewards" if rewards else repr(value)[:100]
            raise UnscoredError(
                "not_finite",
                "a function of TRL's form returns a list of one number for each completion; it got 1 completion"
                f" and returned {shown} ({type(value).__name__})",
            )  # fmt: skip
        if rewards[0] is None:
            raise NoRewardError("the function returned None: it has no reward for this row")
        return rewards[0]


FORMS: Final[Mapping[str, Form]] = {"": Form(), "verl": VerlForm(), "trl": TrlForm(), "trl_chat": TrlForm(is_chat=True)}


def called_with(function: Callable[..., Any], form: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a function of a form is called with; what another trainer's does not take is left out. Raises: ValueError."""
    arguments = FORMS[form].arguments(given)
    if not form:
        return arguments
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return arguments
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def require_fitting(function: Callable[..., Any], form: str, sample: Mapping[str, Any]) -> None:
    """Check that a function can be called as its form says; ``sample``: the arguments of a job, of which only names count.

    Raises: ValueError that says which form the function seems to have.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a function without a signature, such as one of C
    try:
        signature.bind(**called_with(function, form, sample))
    except (TypeError, ValueError) as error:
        raise ValueError(f"it cannot be called: {error}. {_way_out(signature, form, sample)}") from error


def _way_out(signature: inspect.Signature, form: str, sample: Mapping[str, Any]) -> str:
    names = tuple(signature.parameters)
    if form.startswith("trl"):
        if only := [name for name in names if name in _ONLY_IN_TRL]:
            return f"It takes {', '.join(only)}, which only TRL's trainer has: give it a default"
        given = FORMS[form].arguments(sample)
        lacking = [name for name, each in signature.parameters.items() if name not in given and _is_required(each)]
        if lacking:
            return f"Columns of the rows are {', '.join(lacking)}: name them in environment.options.task_columns"
    for other, mark in (("verl", "solution_str"), ("trl", "completions")):
        if mark in names and form != other:
            return f'It seems to be one of {other}\'s form: set environment.options.reward_form = "{other}"'
    return f"Its parameters are ({', '.join(names)})"


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)


def _is_reportable(name: Any, part: Any) -> bool:
    """Whether a component may have this name and value."""
    if not isinstance(name, str) or COMPONENT_NAME.fullmatch(name) is None:
        return False
    try:
        value_of({name: part})
    except UnscoredError:
        return False
    return True


def _unheard(name: str, value: Any) -> None:
    """TRL's ``log_extra`` and ``log_metric``: there is no table of completions here."""
