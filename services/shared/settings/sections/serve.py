"""The section of the service for clients."""

from pydantic import Field

from gspo_services.shared.settings.sections.section import Port, Section


class ServeSection(Section):
    """``gspo serve``: clients of Tinker's API train adapters of model.path, and sample from them."""

    names: list[str] = Field([])
    """Names under which clients ask for the model, such as ["Qwen/Qwen3-8B"]. Empty: the name of model.path's folder."""
    host: str = "127.0.0.1"
    """Address that the service listens on. Any other than loopback needs the variable GSPO_SERVE_KEY, which clients have as
    TINKER_API_KEY, or security.allow_plaintext if nobody else can reach it."""
    port: Port = 8765
    """Port that the service listens on."""
