"""Turns the body of a chat completion into a CallRequest, or refuses it and names the faulty field."""

from typing import Any, Final, NamedTuple

from gspo_services.rollout.endpoint.asked import AgentCall
from gspo_services.rollout.endpoint.calls import CallRefused, CallRequest
from gspo_services.rollout.endpoint.chat.answers import ChatWriter
from gspo_services.rollout.endpoint.chat.messages import checked_messages
from gspo_services.rollout.endpoint.fields import Fields, is_whole, wrong
from gspo_services.rollout.endpoint.sampling import RunSampling, demanded, overridden_sampling, overridden_tools
from gspo_services.rollout.endpoint.tools import MAX_TOOLS, CheckedTools, inside_function
from gspo_services.shared.runtime.plain_text import one_line

WITHOUT_EFFECT: Final = (
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


def read_call(plain: object, sampling: RunSampling, model: str) -> AgentCall:
    """Raises: CallRefused, status 400, or 404 for a model that a strict run does not have."""
    fields = Fields(plain)
    messages_plain = fields.items("messages")
    if messages_plain is None:
        raise wrong("messages", "a list of messages", None)
    overridden = overridden_sampling(fields, sampling, model)
    tools = CheckedTools(fields.items("tools", most=MAX_TOOLS) or [], "tools", inside_function)
    one = "parallel_tool_calls" if fields.flag("parallel_tool_calls") is False else ""
    overridden += overridden_tools(tools, one_at_a_time=one, sampling=sampling)
    choice = read_choice(fields, tools, inside="function")
    messages, unknown = checked_messages(messages_plain, "messages")
    include_usage = _include_usage(fields)
    request = CallRequest(
        messages=messages,
        tools=tools.tools if choice.may_call else [],
        must_call=choice.must_call,
        max_tokens=_max_tokens(fields),
        stop=read_stops(fields, "stop"),
        stop_token_ids=_stop_token_ids(fields),
        template_arguments=_template_arguments(fields),
    )
    stream, logprobs = bool(fields.flag("stream")), bool(fields.flag("logprobs"))
    for name in WITHOUT_EFFECT:
        fields.value(name)
    return AgentCall(
        request=request,
        stream=stream,
        writer=ChatWriter(model, include_usage=include_usage, logprobs=logprobs),
        overridden=tuple(overridden),
        unknown=(*fields.unknown, *(f"messages[].{name}" for name in sorted(unknown))),
    )


class ToolChoice(NamedTuple):
    """What the agent says about calls of tools."""

    may_call: bool = True
    must_call: str | None = None
    """See ``CallRequest.must_call``."""


def read_choice(fields: Fields, tools: CheckedTools, *, inside: str = "") -> ToolChoice:
    """Return what OpenAI's ``tool_choice`` says. ``inside``: the field of a named choice that has the name, empty for the
    choice itself. Raises: CallRefused.
    """
    choice = fields.value("tool_choice")
    path = fields.path("tool_choice")
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice(may_call=False)
    if choice == "required":
        return ToolChoice(must_call=demanded(path, tools))
    if not isinstance(choice, dict):
        raise wrong(path, '"auto", "none", "required" or an object', choice)
    named = Fields(choice, path)
    if named.value("type") != "function":
        raise wrong(named.path("type"), '"function", the only kind of tool that this endpoint has', named.value("type"))
    if inside:
        named = Fields(named.value(inside), named.path(inside))
    return ToolChoice(must_call=demanded(path, tools, named.required_text("name")))


def _max_tokens(fields: Fields) -> int | None:
    """Return the smaller value of OpenAI's two fields for it."""
    limits = [fields.count(name, lowest=1) for name in ("max_completion_tokens", "max_tokens")]
    return min((limit for limit in limits if limit is not None), default=None)


def read_stops(fields: Fields, name: str, most: int = _MAX_STOPS) -> tuple[str, ...]:
    """Return texts that end an answer. Raises: CallRefused."""
    value = fields.value(name)
    stops = [] if value is None else [value] if isinstance(value, str) else value
    expected = f"a string, or a list of at most {most}, each of 1 to {_MAX_STOP_CHARACTERS} characters"
    if not isinstance(stops, list) or len(stops) > most:
        raise wrong(name, expected, value)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= _MAX_STOP_CHARACTERS:
            raise wrong(name, expected, stop)
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


def _include_usage(fields: Fields) -> bool:
    """Return whether the stream ends with a count of tokens."""
    value = fields.value("stream_options")
    if value is None:
        return False
    return bool(Fields(value, "stream_options").flag("include_usage"))
