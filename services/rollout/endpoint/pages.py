"""The pages that all dialects share: the only model, and errors."""

from typing import Any, Final

import msgspec

from gspo_services.rollout.endpoint.calls import CallRefused

ANTHROPIC_ERRORS: Final = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def models_page(model: str) -> bytes:
    """List the only model, as OpenAI and as Anthropic do."""
    ends = {"first_id": model, "last_id": model, "has_more": False}
    return msgspec.json.encode({"object": "list", "data": [_model(model)], **ends})


def model_page(model: str) -> bytes:
    """Describe the model."""
    return msgspec.json.encode(_model(model))


def _model(model: str) -> dict[str, Any]:
    # It has no creation time: it is being trained.
    openai = {"id": model, "object": "model", "created": 0, "owned_by": "gspo"}
    return {**openai, "type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}


def openai_error(refused: CallRefused, _: str = "") -> bytes:
    """Return the body that says why a call was refused, as OpenAI has it."""
    return msgspec.json.encode({"error": openai_reason(refused)})


def openai_reason(refused: CallRefused) -> dict[str, Any]:
    """Return what stands in OpenAI's body of an error."""
    return {
        "message": refused.text,
        "type": "server_error" if refused.status >= 500 else "invalid_request_error",
        "param": refused.param,
        "code": refused.code,
    }


def anthropic_error(refused: CallRefused, request_id: str = "") -> bytes:
    """Return the body that says why a call was refused, as Anthropic has it, with our code beside it."""
    kind = ANTHROPIC_ERRORS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": refused.text, "code": refused.code}
    if refused.details is not None:
        error["details"] = refused.details
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})
