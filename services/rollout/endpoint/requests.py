"""Turns the body of a chat completion into a CallRequest, or refuses it and names the faulty field."""

import math
from typing import Any, Final

import msgspec

from gspo_services.rollout.endpoint.calls import CallRefused, CallRequest
from gspo_services.rollout.endpoint.fields import Fields, decode, is_whole, is_zero, wrong
from gspo_services.rollout.endpoint.messages import checked_messages
from gspo_services.rollout.endpoint.tools import MAX_TOOLS, CheckedTools
from gspo_services.rollout.endpoint.untrainable import DISTRIBUTION, refuse_untrainable, unsupported
from gspo_services.shared.runtime.plain_text import one_line

OVERRIDABLE: Final = ("model", "temperature", "top_p", "top_k", "min_p", "tools.strict")
"""Fields that an agent may set but the run decides, in the order of the answer's header."""
_WITHOUT_EFFECT: Final = (
    "seed", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "verbosity",
)  # fmt: skip
"""OpenAI's fields that are ignored: they name the caller, or ask for something that a run decides or cannot offer."""
_RESERVED: Final = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "bos_token", "eos_token", "pad_token", "unk_token",
)  # fmt: skip
"""Template variables that come from elsewhere: an agent's options must not replace them."""
_MAX_STOPS: Final = 4
_MAX_STOP_CHARACTERS: Final = 256
_MAX_STOP_TOKENS: Final = 64


class RunSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The run's sampling, whatever the agent asks for: the learner computes log-probs of exactly this."""

    temperature: float = 1.0
    top_p: float = 1.0
    strict: bool = False
    """Refuse a call with other values, instead of overriding them."""


class AgentCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call and the form of its answer."""

    request: CallRequest
    stream: bool
    include_usage: bool
    """In a stream, a last piece that counts tokens."""
    logprobs: bool
    overridden: tuple[str, ...]
    """The OVERRIDABLE fields whose values the run replaced."""
    unknown: tuple[str, ...]
    """Fields that this endpoint does not know and ignores."""


def read_call(body: bytes | bytearray, sampling: RunSampling, model: str) -> AgentCall:
    """Raises: CallRefused, status 400, or 404 for a model that a strict run does not have."""
    try:
        plain = decode(body)
    except ValueError as error:
        raise CallRefused(400, "invalid_json", f"the body is not JSON: {error}") from error
    fields = Fields(plain)
    messages_plain = fields.items("messages")
    if messages_plain is None:
        raise wrong("messages", "a list of messages", None)
    refuse_untrainable(fields)
    overridden = _overridden_sampling(fields, sampling, model)
    tools = CheckedTools(fields.items("tools", most=MAX_TOOLS) or [], "tools")
    if tools.has_strict:
        overridden.append("tools.strict")
    if sampling.strict and overridden:
        raise _strictly_refused(overridden[0], sampling, model)
    may_call = _may_call(fields, has_tools=bool(tools.tools))
    messages, unknown = checked_messages(messages_plain, "messages")
    options = _stream_options(fields)
    call = AgentCall(
        request=CallRequest(
            messages=messages,
            tools=tools.tools if may_call else [],
            max_tokens=_max_tokens(fields),
            stop=_stop(fields),
            stop_token_ids=_stop_token_ids(fields),
            template_arguments=_template_arguments(fields),
        ),
        stream=bool(fields.flag("stream")),
        include_usage=options,
        logprobs=bool(fields.flag("logprobs")),
        overridden=tuple(overridden),
        unknown=(),
    )
    for name in _WITHOUT_EFFECT:
        fields.value(name)
    names = [*fields.unknown, *(f"messages[].{name}" for name in sorted(unknown))]
    return msgspec.structs.replace(call, unknown=tuple(names))


def _overridden_sampling(fields: Fields, sampling: RunSampling, model: str) -> list[str]:
    """Return the model and sampling fields in which the agent differs from the run."""
    temperature = fields.number("temperature", lowest=0, highest=100)
    if temperature == 0:
        reason = f"greedy tokens are not drawn from a distribution that can be trained, and {DISTRIBUTION}"
        raise unsupported("temperature", reason, f"leave it out: the run samples at {sampling.temperature:g}")
    top_p = fields.number("top_p", lowest=0, highest=1)
    top_k = fields.value("top_k")
    if top_k is not None and not (is_whole(top_k) and top_k >= -1):
        raise wrong("top_k", "a whole number of at least -1", top_k)
    min_p = fields.number("min_p", lowest=0, highest=1)
    differs = {
        "model": fields.text("model") not in (None, model),
        "temperature": temperature is not None and not math.isclose(temperature, sampling.temperature),
        "top_p": top_p is not None and not math.isclose(top_p, sampling.top_p),
        "top_k": top_k not in (None, -1, 0),
        "min_p": min_p is not None and not is_zero(min_p),
    }
    return [name for name, is_other in differs.items() if is_other]


def _strictly_refused(name: str, sampling: RunSampling, model: str) -> CallRefused:
    if name == "model":
        return CallRefused(
            404, "model_not_found", f"model must be {model!r}, which this run trains, or left out", param=name
        )
    own = {"temperature": f" of {sampling.temperature:g}", "top_p": f" of {sampling.top_p:g}"}.get(name, "")
    reason = f"the run's own value{own} applies, because with another one {DISTRIBUTION}"
    return unsupported(name, reason, "Leave it out, or let the run override it")


def _may_call(fields: Fields, *, has_tools: bool) -> bool:
    """Return whether the model sees its tools. Refuse a choice that the sampler would have to enforce."""
    parallel = fields.flag("parallel_tool_calls")
    if parallel is False and has_tools:
        raise unsupported("parallel_tool_calls", DISTRIBUTION, "Leave it out, and answer each call that the model makes")
    choice = fields.value("tool_choice")
    if choice == "none":
        return False
    if choice is None or choice == "auto":
        return True
    if not isinstance(choice, dict) and choice != "required":
        raise wrong("tool_choice", '"auto", "none", "required" or an object', choice)
    raise unsupported("tool_choice", DISTRIBUTION, 'Use "auto", and ask for the call in the prompt')


def _max_tokens(fields: Fields) -> int | None:
    """Return the smaller value of OpenAI's two fields for it."""
    limits = [fields.count(name, lowest=1) for name in ("max_completion_tokens", "max_tokens")]
    return min((limit for limit in limits if limit is not None), default=None)


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    expected = f"a string, or a list of at most {_MAX_STOPS}, each of 1 to {_MAX_STOP_CHARACTERS} characters"
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS:
        raise wrong("stop", expected, value)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= _MAX_STOP_CHARACTERS:
            raise wrong("stop", expected, stop)
    return tuple(stops)


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.items("stop_token_ids", most=_MAX_STOP_TOKENS) or []
    for token in ids:
        if not is_whole(token) or not 0 <= token < 2**31:
            raise wrong("stop_token_ids", "a list of token ids", token)
    return tuple(ids)


def _template_arguments(fields: Fields) -> dict[str, Any]:
    arguments = fields.free("chat_template_kwargs") or {}
    for name in arguments:
        if not name.isidentifier() or name in _RESERVED:
            text = f"chat_template_kwargs has {one_line(name, 64)!r}, which is not an option of chat templates: leave it out"
            raise CallRefused(400, "invalid_value", text, param="chat_template_kwargs")
    effort = fields.text("reasoning_effort")
    # A template that knows no effort does not read it.
    return arguments if effort is None else {"reasoning_effort": effort, **arguments}


def _stream_options(fields: Fields) -> bool:
    """Return whether the stream ends with a count of tokens."""
    value = fields.value("stream_options")
    if value is None:
        return False
    return bool(Fields(value, "stream_options").flag("include_usage"))
