"""Where the policy is to state its answer: what the prompt asks for, and what the set's own scorer looks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gspo.tasks.environments import ChatMessage
from gspo_services.tasks.environments.maths.final_answer import ANSWER_TAG
from gspo_services.tasks.environments.maths.layouts import GSM8K_MARKER
from gspo_services.tasks.environments.sources import chat_messages

ANSWER_LINE: Final = "Answer:"
BOX: Final = "box"
AUTO: Final = "auto"
BOXED_PROMPT: Final = "Reason step by step, and put your final answer within \\boxed{}."
CHOICE_PROMPT: Final = "Reason step by step, and put the letter of the right option within \\boxed{}."
# DAPO: 'The last line of your response should be of the form Answer: $Answer'.
_LINE: Final = re.compile(r"""answer:\s*\$answer|["'`\u201c]answer:""", re.IGNORECASE)
_BY_SOURCE: Final = {
    "openai/gsm8k": GSM8K_MARKER, "math_dapo": ANSWER_LINE, "math": ANSWER_LINE, "math_dapo_reasoning": ANSWER_LINE,
}  # fmt: skip
"""As verl's default_compute_score chooses by data_source (verl/utils/reward_score/__init__.py)."""


def asked_form(prompt: Any) -> str | None:
    """What a prompt, text or messages, asks for: a marker, ``BOX``, or None when it leaves the form open."""
    text = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
    if _LINE.search(text):
        return ANSWER_LINE
    if GSM8K_MARKER in text:
        return GSM8K_MARKER
    if "\\boxed" in text:
        return BOX
    return ANSWER_TAG if ANSWER_TAG in text and "</answer>" in text else None


def marker_of(record: Mapping[str, Any], prompt: Any) -> str | None:
    """What the policy's answer stands behind; "" for a box; None where neither prompt nor data_source says."""
    asked = asked_form(prompt)
    if asked is not None:
        return "" if asked == BOX else asked
    source = record.get("data_source")
    if not isinstance(source, str) or "reward_model" not in record:
        return None
    return ANSWER_LINE if source.startswith("aime") else _BY_SOURCE.get(source)


def marker_in(text: str, marker: str) -> str:
    """The marker as ``text`` has it last, such as "answer :" for "Answer:": verl's scorers read both."""
    if not marker:
        return ""
    word, colon = (marker[:-1], r"\s*:") if marker.endswith(":") else (marker, "")
    found = [match[0] for match in re.finditer(re.escape(word) + colon, text, re.IGNORECASE)]
    return found[-1] if found else marker


def system_prompt_of(prompt: Any, marker: str, *, is_choice: bool = False) -> str:
    """The instruction that the prompt lacks; "" where it says itself how to answer."""
    if asked_form(prompt) is not None:
        return ""
    if not marker:
        return CHOICE_PROMPT if is_choice else BOXED_PROMPT
    what = "letter of the right option" if is_choice else "final answer"
    return f"Solve the problem step by step. Give the {what} after {marker}"


def messages_of(prompt: Any, system_prompt: str, marker: str | None, *, is_choice: bool = False) -> list[ChatMessage]:
    """How a prompt, text or messages, is put to the policy: behind ``system_prompt``, unless that is "" or it has its own.

    ``AUTO`` is the instruction that it lacks for ``marker``, and nothing where that is None: nobody compares the answer. Of
    a multiple choice it asks for a letter.
    """
    asked: list[ChatMessage] = (
        chat_messages("prompt", prompt) if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
    )
    if system_prompt == AUTO:
        system_prompt = "" if marker is None else system_prompt_of(prompt, marker, is_choice=is_choice)
    if not system_prompt or asked[0]["role"] == "system":
        return asked
    return [{"role": "system", "content": system_prompt}, *asked]
