"""The base of every section of a configuration file."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Number = Annotated[int, Field(ge=0)]
"""The index of a GPU or a core, from 0."""


class Section(BaseModel):
    """Base of all sections: immutable, and a misspelt key is an error. The text below a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
