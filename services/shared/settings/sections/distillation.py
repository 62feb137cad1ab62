"""The section of the teacher, whose judgement of each token joins the advantages."""

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from gspo_services.shared.runtime.paths import expanded
from gspo_services.shared.settings.sections.section import PositiveSeconds, Section

SERVERS = ("http://", "https://")
SCORES_DIRECTORY = "teacher-scores"
"""In the run's directory: what a server said, a SQLite file for each rank."""


def _place(text: str) -> str:
    return text.rstrip("/") if text.startswith(SERVERS) or not text else str(expanded(text))


class DistillationSection(Section):
    """On-policy distillation: a teacher scores each token that the policy samples, and log pi_teacher - log mu joins the
    token's advantage. See docs/gspo.md. Off by default.
    """

    teacher: Annotated[str, AfterValidator(_place)] = ""
    """The teacher, which has the policy's tokenizer: the directory of a Hugging Face model, of which each rank keeps a whole
    frozen copy, in learner.dtype, and makes one more forward pass; or the URL of an SGLang server, such as
    http://teacher:30000, which the learner asks before each batch. A server needs a --context-length of at least 7 tokens
    more than sampling.max_tokens. What it says is kept in teacher-scores/ in the run's directory: a batch that is trained
    again, or replayed, needs no server. Empty: there is none."""
    coefficient: float = Field(1.0, gt=0)
    """What the teacher's log-ratio, in nats, counts beside the advantage that comes from the rewards."""
    only: bool = False
    """true: the teacher's log-ratio is the whole advantage; rewards are measured, and train nothing. false: both are
    added."""

    timeout_s: PositiveSeconds = 300.0
    """How long a server may take to score one sequence."""

    @property
    def url(self) -> str:
        """The teacher's, if it is a server; else empty."""
        return self.teacher if self.teacher.startswith(SERVERS) else ""

    @property
    def directory(self) -> str:
        """The teacher's, if it is a model; else empty."""
        return "" if self.url else self.teacher

    @model_validator(mode="after")
    def _somebody_teaches(self) -> "DistillationSection":
        if self.only and not self.teacher:
            raise ValueError(
                "distillation.only is true and distillation.teacher is empty: nothing would be trained; name the teacher, "
                "or leave only out"
            )
        return self
