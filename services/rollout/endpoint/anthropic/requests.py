"""Turns the body of one of Anthropic's messages into a CallRequest, or refuses it and names the faulty field."""

from typing import Final

from gspo_services.rollout.endpoint.anthropic.answers import MessageWriter
from gspo_services.rollout.endpoint.anthropic.blocks import messages_of, refuse_servers
from gspo_services.rollout.endpoint.asked import AgentCall
from gspo_services.rollout.endpoint.calls import CallRequest
from gspo_services.rollout.endpoint.chat import ToolChoice, read_stops
from gspo_services.rollout.endpoint.fields import Fields, wrong
from gspo_services.rollout.endpoint.sampling import RunSampling, demanded, overridden_sampling, overridden_tools
from gspo_services.rollout.endpoint.tools import MAX_TOOLS, CheckedTools, with_input_schema
from gspo_services.rollout.endpoint.untrainable import plain_format

_WITHOUT_EFFECT: Final = (
    "metadata", "service_tier", "thinking", "betas", "context_management", "cache_control", "inference_geo", "speed",
)  # fmt: skip
_MOST_STOPS: Final = 16


def read_message(plain: object, sampling: RunSampling, model: str) -> AgentCall:
    """Raises: CallRefused, status 400, or 404 for a model that a strict run does not have."""
    fields = Fields(plain)
    refuse_servers(fields)
    overridden = overridden_sampling(fields, sampling, model)
    for name in ("output_format", "output_config"):
        asked = fields.value(name)
        form = asked.get("format") if name == "output_config" and isinstance(asked, dict) else asked
        overridden += plain_format(name, form, strict=sampling.strict)
    tools = CheckedTools(fields.items("tools", most=MAX_TOOLS) or [], "tools", with_input_schema)
    choice, one = _choice(fields, tools)
    overridden += overridden_tools(tools, one_at_a_time=one, sampling=sampling)
    messages, unknown = messages_of(fields)
    request = CallRequest(
        messages=messages,
        tools=tools.tools if choice.may_call else [],
        must_call=choice.must_call,
        max_tokens=fields.count("max_tokens", lowest=1),
        stop=read_stops(fields, "stop_sequences", _MOST_STOPS),
    )
    stream = bool(fields.flag("stream"))
    for name in _WITHOUT_EFFECT:
        fields.value(name)
    return AgentCall(
        request=request,
        stream=stream,
        writer=MessageWriter(model),
        overridden=tuple(overridden),
        unknown=(*fields.unknown, *sorted(unknown)),
    )


def _choice(fields: Fields, tools: CheckedTools) -> tuple[ToolChoice, str]:
    """Return what ``tool_choice`` says, and the field that allows one call of a tool in an answer, if it is set."""
    plain = fields.value("tool_choice")
    if plain is None:
        return ToolChoice(), ""
    path = fields.path("tool_choice")
    asked = Fields(plain, path)
    one = asked.path("disable_parallel_tool_use") if asked.flag("disable_parallel_tool_use") else ""
    match asked.value("type"):
        case "auto":
            return ToolChoice(), one
        case "none":
            return ToolChoice(may_call=False), one
        case "any":
            return ToolChoice(must_call=demanded(path, tools)), one
        case "tool":
            return ToolChoice(must_call=demanded(path, tools, asked.required_text("name"))), one
    raise wrong(asked.path("type"), '"auto", "any", "tool" or "none"', asked.value("type"))
