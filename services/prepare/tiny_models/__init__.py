"""Small models that are made here, what they know, and problems for them."""

from gspo_services.prepare.tiny_models.small_programs import small_problems

__all__ = ["small_problems"]
