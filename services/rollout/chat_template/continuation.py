"""What a template writes between an assistant's turn, which was sampled, and the beginning of its next turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_services.rollout.chat_template.errors import TokenizerError
from gspo_services.rollout.chat_template.template import SENTINEL, Arguments, ChatTemplate, Messages, Tools

_USER = {"role": "user", "content": "."}
_SAID = {"role": "assistant", "content": SENTINEL}


@dataclass(frozen=True)
class Continuation:
    """Text after an answer."""

    text: str
    """From the end of the answer on: what closes the turn, the new messages, the beginning of the next turn."""
    closing: Callable[[], str]
    """What closes an answer that is the last message; ``text`` begins with it, unless the template closes earlier ones
    otherwise."""
    is_after_call: bool
    """The answer is a turn with tool calls."""


class Rewritten(TokenizerError):
    """The template changes earlier messages when others follow, so that a conversation cannot be continued."""


def continuation(
    template: ChatTemplate, new: Messages, tools: Tools, arguments: Arguments, *, called_first: bool
) -> Continuation:
    """Return what ``template`` writes after an answer that ``new`` messages follow.

    Results of tools follow a turn that called tools where ``called_first``, and otherwise only where the template takes
    them nowhere else. Raises: TokenizerError when it drops answers or refuses the messages; Rewritten.
    """
    turns = [_SAID]
    if new and new[0].get("role") == "tool":
        turns = [_called(new), _SAID] if called_first else [_SAID, _called(new)]
    refusal: TokenizerError | None = None
    for turn in turns:
        # A template that knows no tool calls refuses or ignores them; then its ordinary turn counts.
        try:
            text = template.render([_USER, turn, *new], tools, arguments)
        except TokenizerError as error:
            refusal = refusal or error
            continue
        before, found, after = text.partition(SENTINEL)
        # Twice means that a message has it as well: somebody tries to move the seam.
        if found and SENTINEL not in after:
            _require_kept(template, before, tools, arguments)
            return Continuation(after, lambda: _closing(template, tools, arguments), is_after_call=turn is not _SAID)
    raise refusal or TokenizerError(
        "the chat template drops the assistant's content: multi-turn episodes cannot be rendered; use another template, or "
        "episodes of one turn"
    )


def _called(new: Messages) -> dict[str, Any]:
    """A turn with a call; its function's name is where the answer would be."""
    call: dict[str, Any] = {"type": "function", "function": {"name": SENTINEL, "arguments": {}}}
    return {"role": "assistant", "content": "", "tool_calls": [{**call, "id": new[0].get("tool_call_id", "call_0")}]}


def _require_kept(template: ChatTemplate, before: str, tools: Tools, arguments: Arguments) -> None:
    """``before``: what stands before the answer once messages follow it. Raises: Rewritten."""
    begun = _tried(lambda: template.render([_USER], tools, arguments, add_generation_prompt=False))
    if begun is not None and before.startswith(begun):
        return
    # Some templates end a conversation without a generation prompt, and some open the reasoning in it.
    opened = _tried(lambda: template.render([_USER], tools, arguments))
    if opened is not None and (before.startswith(opened) or opened.startswith(before)):
        return
    if begun is not None or opened is not None:
        raise Rewritten(
            "the chat template rewrites earlier messages when others follow, so that no conversation can go on from its "
            "sampled tokens: use a template that only appends, or episodes of one turn"
        )


def _closing(template: ChatTemplate, tools: Tools, arguments: Arguments) -> str:
    text = _tried(lambda: template.render([_USER, _SAID], tools, arguments, add_generation_prompt=False)) or ""
    return text.partition(SENTINEL)[2]


def _tried(render: Callable[[], str]) -> str | None:
    try:
        return render()
    except TokenizerError:
        return None


def stop_at(ids: Sequence[int], stop_ids: frozenset[int]) -> int | None:
    """Return where the first stop token is; None where there is none."""
    return next((index for index, token in enumerate(ids) if token in stop_ids), None)
