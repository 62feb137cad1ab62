"""Sampling that an agent may ask for but the run decides: overridden, or refused by a strict run."""

import math
from typing import Final

import msgspec

from gspo_services.rollout.endpoint.asked import AgentCall
from gspo_services.rollout.endpoint.calls import CallRefused
from gspo_services.rollout.endpoint.fields import Fields, is_whole, is_zero, wrong
from gspo_services.rollout.endpoint.tools import CheckedTools
from gspo_services.rollout.endpoint.untrainable import DISTRIBUTION, overridden_or_refused, unsupported

OVERRIDABLE: Final = (
    "model", "temperature", "top_p", "top_k", "min_p", "tools.strict", "parallel_tool_calls", "tool_choice",
    "response_format",
)  # fmt: skip
"""The usual ones of the fields that an agent may set but the run decides."""


class RunSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The run's sampling, whatever the agent asks for: the learner computes log-probs of exactly this."""

    temperature: float = 1.0
    top_p: float = 1.0
    strict: bool = False
    """Refuse a call with other values, instead of overriding them."""


def overridden_sampling(fields: Fields, sampling: RunSampling, model: str) -> list[str]:
    """Return the model and the sampling fields in which the agent differs from the run.

    Raises: CallRefused for what is wrong or cannot be left aside, and for any of them where the run is strict.
    """
    steered = overridden_or_refused(fields, strict=sampling.strict)
    temperature = fields.number("temperature", lowest=0, highest=100)
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
    if sampling.strict and temperature == 0 and differs["temperature"]:
        reason = f"greedy tokens are not drawn from a distribution that can be trained, and {DISTRIBUTION}"
        raise unsupported("temperature", reason, f"leave it out: the run samples at {sampling.temperature:g}")
    names = [name for name, is_other in differs.items() if is_other]
    if sampling.strict and names:
        raise _strictly_refused(names[0], sampling, model)
    return names + steered


def _strictly_refused(name: str, sampling: RunSampling, model: str) -> CallRefused:
    if name == "model":
        return CallRefused(
            404, "model_not_found", f"model must be {model!r}, which this run trains, or left out", param=name
        )
    own = {"temperature": f" of {sampling.temperature:g}", "top_p": f" of {sampling.top_p:g}"}.get(name, "")
    reason = f"the run's own value{own} applies, because with another one {DISTRIBUTION}"
    return unsupported(name, reason, "Leave it out, or let the run override it")


def overridden_tools(tools: CheckedTools, *, one_at_a_time: str, sampling: RunSampling) -> list[str]:
    """Return what the agent asks of calls that only the sampler could enforce. ``one_at_a_time``: the field that allows one
    call of a tool in an answer, empty if the agent did not set it. Raises: CallRefused where the run is strict.
    """
    asked = [("tools.strict", "Leave it out, and check the arguments")] if tools.has_strict else []
    if one_at_a_time and tools.tools:
        asked.append((one_at_a_time, "Leave it out, and answer each call that the model makes"))
    if asked and sampling.strict:
        raise unsupported(asked[0][0], DISTRIBUTION, asked[0][1])
    return [name for name, _ in asked]


def demanded(path: str, tools: CheckedTools, name: str | None = None) -> str:
    """Return which tool the answer must call: ``name``, or "" for any of them.

    Raises: CallRefused when no such tool is offered.
    """
    names = [tool["function"]["name"] for tool in tools.tools]
    if not names:
        raise wrong(path, '"auto" or left out, because no tools are offered', name or "a demand for a call")
    if name is not None and name not in names:
        raise wrong(path, f"one of the tools that are offered, such as {names[0]}", name)
    return name or ""


def without_demand(asked: AgentCall, *, strict: bool) -> AgentCall:
    """Return the call for a model whose format cannot open a call of a tool: it chooses by itself.

    Raises: CallRefused where the run is strict.
    """
    if strict:
        raise unsupported("tool_choice", DISTRIBUTION, 'Use "auto", and ask for the call in the prompt')
    request = msgspec.structs.replace(asked.request, must_call=None)
    return msgspec.structs.replace(asked, request=request, overridden=(*asked.overridden, "tool_choice"))
