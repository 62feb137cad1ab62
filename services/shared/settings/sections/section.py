"""The base of every section of a configuration file."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from gspo_services.shared.runtime.paths import expanded

Port = Annotated[int, Field(ge=0, le=65535)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Number = Annotated[int, Field(ge=0)]
"""The index of a GPU or a core, from 0."""


def _expanded(value: Any) -> Any:
    return expanded(value) if isinstance(value, str) else value


FilePath = Annotated[Path, BeforeValidator(_expanded)]
"""A path in which ``~`` and ``$NAME`` are filled in."""
OptionalPath = Annotated[str, AfterValidator(lambda text: str(expanded(text)) if text else "")]
"""Likewise; empty where it is left out."""


class Section(BaseModel):
    """Base of all sections: immutable, and a misspelt key is an error. The text below a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
