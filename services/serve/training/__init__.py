"""The learner's side of the service: models of clients in one engine. Only this room of the wing imports torch."""

from gspo_services.serve.training.models import ClientModels, open_client_models

__all__ = ["ClientModels", "open_client_models"]
