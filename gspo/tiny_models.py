"""Tiny mixtures of experts that have a skill and a bad policy: what a demonstration of reinforcement learning starts from.

``gspo model tiny`` makes those of the examples (``make_tiny_model``). For a task of your own, write a ``Demonstrator``: a
teacher's conversations as ``Lesson``s. ``imitate`` teaches them to a model. examples/repair_model.py does.

    tokenizer = build_tokenizer(tools=True)
    model = build_model(tokenizer)
    imitate(model, [demonstrator], random.Random(0), 600, progress)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)

A door: what it gives is in the services of this project, so an import needs their packages and the learner's
(``pip install 'gspo[services,learner]'``), and without them is an ImportError that says so.
"""

from __future__ import annotations

from gspo.extras import needs_extras

with needs_extras(__name__, "services,learner"):
    from gspo_services.prepare.tiny_models.imitation import TinyProgress, imitate
    from gspo_services.prepare.tiny_models.lessons import IGNORED_LABEL, Lesson, encode_conversations
    from gspo_services.prepare.tiny_models.schools import Demonstrator
    from gspo_services.prepare.tiny_models.tiny import TinyReport, build_model, make_tiny_model
    from gspo_services.prepare.tiny_models.tokenizer import build_tokenizer

__all__ = [
    "IGNORED_LABEL",
    "Demonstrator",
    "Lesson",
    "TinyProgress",
    "TinyReport",
    "build_model",
    "build_tokenizer",
    "encode_conversations",
    "imitate",
    "make_tiny_model",
]
