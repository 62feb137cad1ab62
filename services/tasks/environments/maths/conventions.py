"""Where the policy is to state its answer: what the prompt asks for, and what the set's own scorer looks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from gspo_services.tasks.environments.maths.layouts import GSM8K_MARKER

ANSWER_LINE: Final = "Answer:"
BOX: Final = "box"
AUTO: Final = "auto"
BOXED_PROMPT: Final = "Reason step by step, and put your final answer within \\boxed{}."
# DAPO: 'The last line of your response should be of the form Answer: $Answer'.
_LINE: Final = re.compile(r"""answer:\s*\$answer|["'`\u201c]answer:""", re.IGNORECASE)
_BY_SOURCE: Final = ((("openai/gsm8k",), GSM8K_MARKER), (("math_dapo", "aime"), ANSWER_LINE))
"""By the beginning of data_source, as verl's default_compute_score chooses (verl/utils/reward_score/__init__.py)."""


def asked_form(prompt: Any) -> str | None:
    """What a prompt, text or messages, asks for: a marker, ``BOX``, or None when it leaves the form open."""
    text = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
    if _LINE.search(text):
        return ANSWER_LINE
    if GSM8K_MARKER in text:
        return GSM8K_MARKER
    return BOX if "\\boxed" in text else None


def marker_of(record: Mapping[str, Any], prompt: Any) -> str | None:
    """What the policy's answer stands behind; "" for a box; None where neither prompt nor data_source says."""
    asked = asked_form(prompt)
    if asked is not None:
        return "" if asked == BOX else asked
    source = record.get("data_source")
    if not isinstance(source, str):
        return None
    return next((marker for beginnings, marker in _BY_SOURCE if source.startswith(beginnings)), None)


def system_prompt_of(prompt: Any, marker: str) -> str:
    """The instruction that the prompt lacks; "" where it says itself how to answer."""
    if asked_form(prompt) is not None:
        return ""
    return f"Solve the problem step by step. Give the final answer after {marker}" if marker else BOXED_PROMPT
