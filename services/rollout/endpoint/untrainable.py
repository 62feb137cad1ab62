"""What is fine for a model but not for one in training: left aside where it would only steer the sampler, else refused."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.fields import Fields, is_whole, is_zero

DISTRIBUTION: Final = (
    "the sampler would draw from a different distribution than the learner's, so the tokens could not be trained exactly"
)
"""Why most of these are refused."""
_ONE_ANSWER: Final = "a call is a turn of one episode, and has one answer. The run samples each task batch.group_size times"
_TEXT_ONLY: Final = "the model of this run reads and writes text only"
_CONTINUED: Final = "the model would continue text that it did not sample, so the turn could not be trained exactly"
_CHECK_IT: Final = "describe the format in the prompt, and check the answer"


class _Rule(NamedTuple):
    changes_nothing: Callable[[Any], bool]
    """Whether a value asks for nothing beyond the default."""
    reason: str
    way_out: str
    steers: bool = False
    """Whether it would only make the sampler draw otherwise: the run's own sampling gives an answer, too."""


def _is_one(value: Any) -> bool:
    return is_whole(value) and bool(value == 1)


def _is_empty(value: Any) -> bool:
    return value is False or value in ([], {}, "")


def _is_plain_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_ONE: Final = _Rule(_is_one, _ONE_ANSWER, "leave it out")
_SHAPED: Final = _Rule(is_zero, DISTRIBUTION, "leave it out", steers=True)
_GUIDED: Final = _Rule(_is_empty, DISTRIBUTION, _CHECK_IT, steers=True)
_LEGACY: Final = _Rule(_is_empty, "functions is OpenAI's deprecated way to offer tools", "use tools and tool_choice")

_RULES: Final[dict[str, _Rule]] = {
    "n": _ONE,
    "best_of": _ONE,
    "use_beam_search": _GUIDED._replace(way_out="leave it out"),
    "logit_bias": _GUIDED._replace(way_out="leave it out"),
    "presence_penalty": _SHAPED,
    "frequency_penalty": _SHAPED,
    "repetition_penalty": _SHAPED._replace(changes_nothing=lambda value: value is not True and value == 1),
    "min_tokens": _SHAPED._replace(way_out="ask for a long answer in the prompt"),
    "min_new_tokens": _SHAPED._replace(way_out="ask for a long answer in the prompt"),
    "ignore_eos": _GUIDED._replace(way_out="leave it out"),
    "bad_words": _GUIDED,
    "allowed_token_ids": _GUIDED,
    "logits_processors": _GUIDED,
    "custom_logit_processor": _GUIDED,
    "response_format": _GUIDED._replace(changes_nothing=_is_plain_text),
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "structured_outputs": _GUIDED,
    "structural_tag": _GUIDED,
    "json_schema": _GUIDED,
    "regex": _GUIDED,
    "ebnf": _GUIDED,
    "functions": _LEGACY,
    "function_call": _Rule(lambda value: value in ("none", "auto"), _LEGACY.reason, _LEGACY.way_out),
    "modalities": _Rule(lambda value: value in ([], ["text"]), _TEXT_ONLY, "leave it out"),
    "audio": _Rule(_is_empty, _TEXT_ONLY, "leave it out"),
    "web_search_options": _Rule(lambda _: False, "this endpoint cannot search the web", "offer a tool that can"),
    "continue_final_message": _Rule(_is_empty, _CONTINUED, "end the messages with a user's or a tool's"),
    "add_generation_prompt": _Rule(lambda value: value is True, _CONTINUED, "leave it out"),
    "echo": _Rule(_is_empty, "an answer holds only sampled text", "leave it out"),
    "top_logprobs": _Rule(
        is_zero,
        "the engine records the log-prob of the token that it sampled, and of no other",
        "use logprobs alone, which returns that one",
    ),
}


def overridden_or_refused(fields: Fields, *, strict: bool) -> list[str]:
    """Return the fields that would only steer the sampler, and are left aside.

    Raises: CallRefused for the first field that asks for something else that is untrainable or unsupported; ``strict``: for
    any of them.
    """
    steered = []
    for name, rule in _RULES.items():
        value = fields.value(name)
        if value is None or rule.changes_nothing(value):
            continue
        if strict or not rule.steers:
            raise unsupported(fields.path(name), rule.reason, rule.way_out)
        steered.append(fields.path(name))
    return steered


def plain_format(path: str, form: object, *, strict: bool) -> list[str]:
    """Return ``path`` if ``form`` asks for anything but plain text, which the run does not enforce. Raises: CallRefused."""
    if form is None or _is_plain_text(form):
        return []
    if strict:
        raise unsupported(path, DISTRIBUTION, _CHECK_IT)
    return [path]


def unsupported(param: str, reason: str, way_out: str) -> CallRefused:
    """Return the refusal of a value that OpenAI accepts but this endpoint does not support."""
    return CallRefused(
        400, "unsupported_value", f"{param} is not supported with this value: {reason}. {way_out}", param=param
    )
