"""Reward functions that use large libraries. Reward workers import them by name."""

from typing import Any

_loaded: Any = None


def of_numpy(completion: str, task: Any) -> Any:
    import numpy

    return numpy.float32(0.5)


def of_torch(completion: str, task: Any) -> Any:
    import torch

    return torch.tensor(0.5).item()


def a_tensor(completion: str, task: Any) -> Any:
    import torch

    return torch.tensor([0.25, 0.75]).mean()


def of_classifier(completion: str, task: Any) -> float:
    """A reward model that is loaded once in the worker."""
    global _loaded
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if _loaded is None:
        folder = task["rm"]
        _loaded = (AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder))
    tokenizer, model = _loaded
    with torch.no_grad():
        ids = tokenizer(task["prompt"] + completion, return_tensors="pt").input_ids
        return float(model(ids).logits[0, 0])


def of_temporary_files(completion: str, task: Any) -> float:
    import os
    import tempfile

    folder = tempfile.mkdtemp()
    return float(os.path.dirname(folder) == tempfile.gettempdir() == os.environ["HOME"])
