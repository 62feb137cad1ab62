"""The section of the teacher, whose judgement of each token joins the advantages."""

from pydantic import Field, model_validator

from gspo_services.shared.settings.sections.section import OptionalPath, Section


class DistillationSection(Section):
    """On-policy distillation: a teacher scores each token that the policy samples, and log pi_teacher - log mu joins the
    token's advantage. See docs/gspo.md. Off by default.
    """

    teacher: OptionalPath = ""
    """Directory of the teacher, a Hugging Face model with the policy's tokenizer. Each rank keeps a whole frozen copy, in
    learner.dtype, and makes one more forward pass. Empty: there is none."""
    coefficient: float = Field(1.0, gt=0)
    """What the teacher's log-ratio, in nats, counts beside the advantage that comes from the rewards."""
    only: bool = False
    """true: the teacher's log-ratio is the whole advantage; rewards are measured, and train nothing. false: both are
    added."""

    @model_validator(mode="after")
    def _somebody_teaches(self) -> "DistillationSection":
        if self.only and not self.teacher:
            raise ValueError(
                "distillation.only is true and distillation.teacher is empty: nothing would be trained; name the teacher's "
                "directory, or leave only out"
            )
        return self
