"""The section on which tasks are sampled, and which groups a batch takes."""

from pydantic import Field

from gspo_services.shared.settings.sections.section import Section


class DataSection(Section):
    """Which groups are worth training on, and which tasks are sampled next. See docs/guide/data.md."""

    dynamic_sampling: bool = False
    """Filter out zero-advantage groups, whose rewards are all equal, and sample other prompts in their place while the batch
    fills: they have no gradient. It costs their tokens, and the training reward is then that of the other groups alone, so
    it is off unless asked for. It may change when a run is resumed."""
    max_filtered: float = Field(8.0, gt=0, le=1000)
    """With dynamic_sampling: at most this many times batch.groups_per_batch groups are filtered out while one batch fills.
    After that the batch takes what there is, with a warning, so that a run ends whose tasks are all solved or too hard."""
    rest_after_groups: int = Field(0, ge=0)
    """A task rests after this many zero-advantage groups in a row, whether dynamic_sampling filters them out or not: it is
    solved always, or never. 0: none rests."""
    rest_batches: int = Field(10, ge=1)
    """A task that rests is not sampled until this many more batches are assembled. Then it returns."""
