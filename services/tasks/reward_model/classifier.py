"""The reward model in transformers: conversations to tokens, batches of tokens to scores."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from gspo_services.tasks.reward_model.conversations import Encoded, NoMemoryError, UnreadableConversationError
from gspo_services.tasks.reward_model.files import require_classifier
from gspo_services.tasks.reward_model.options import RewardModelOptions

_NO_LIMIT: Final = 10**9
"""Tokenizers without a limit say a number above."""
_OF_OTHER_HEADS: Final = ("lm_head.",)
"""What trainers leave in the files of a model that was one of language before; no classifier reads it."""
_PROBE: Final = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]


def load_classifier(options: RewardModelOptions) -> Classifier:
    """Load the model of ``options``. Raises: ValueError when it is none that gives one number; errors of the libraries."""
    path = Path(options.path)
    require_classifier(path)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ValueError(f"its tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
    if options.input == "chat" and not tokenizer.chat_template:
        raise ValueError(
            'its tokenizer has no chat template: set reward.model_input = "text" or "pair", whichever it was trained with'
        )
    model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        path,
        dtype=options.dtype if options.dtype == "auto" else getattr(torch, options.dtype),
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"its files lack {', '.join(missing[:3])}: the weights are not those of config.json's architecture")
    if unread := sorted(name for name in loading["unexpected_keys"] if not name.startswith(_OF_OTHER_HEADS)):
        raise ValueError(
            f"its files hold {', '.join(unread[:3])}, for which config.json's architecture has no place: the scores would "
            "be another model's; correct config.json, or save the model again"
        )
    classifier = Classifier(model.eval().to(_device(options.device)), tokenizer, options)
    classifier.probe()
    return classifier


class Classifier:
    """A loaded model with its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, options: RewardModelOptions) -> None:
        """Raises: ValueError when ``max_tokens`` is above what the model takes."""
        self._model = model
        tokenizer.truncation_side = "right"  # Some say "left", which a cut conversation here never means.
        self._tokenizer = tokenizer
        self._options = options
        self._config = model.config.get_text_config()
        # Many tokenizers say types, also beside decoders, of which some would refuse them.
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        self._own_pad = self._config.pad_token_id
        limit = min(
            getattr(self._config, "max_position_embeddings", None) or _NO_LIMIT, tokenizer.model_max_length or _NO_LIMIT
        )
        if options.max_tokens > limit:
            raise ValueError(f"reward.model_max_tokens is {options.max_tokens}, and the model takes {limit}: lower it")
        self._most_tokens = options.max_tokens or limit

    def probe(self) -> None:
        """Score a conversation of two words. Raises: ValueError when the outcome is not one finite number."""
        logits = self._logits([self.encode(_PROBE)])
        if tuple(logits.shape) != (1, 1):
            raise ValueError(f"it gives {logits.shape[-1]} numbers for a conversation, and a reward is one")
        if not torch.isfinite(logits).all():
            raise ValueError(
                f"it gives {logits.item()} for a conversation of two words: its weights are damaged, or too large for "
                f"reward.model_dtype, which is {self._options.dtype}"
            )

    def encode(self, messages: list[dict[str, Any]]) -> Encoded:
        """The tokens of a conversation. Raises: UnreadableConversationError."""
        try:
            encoded = self._encode(messages, cut=False)
            is_cut = len(encoded["input_ids"]) > self._most_tokens
            if is_cut and self._options.too_long == "truncate":
                encoded = self._encode(messages, cut=True)
        except Exception as error:
            raise UnreadableConversationError(
                "bad_job", f"the reward model's tokenizer cannot read it: {type(error).__name__}: {error}"[:2000]
            ) from error
        ids = encoded["input_ids"]
        if is_cut and self._options.too_long == "fail":
            raise UnreadableConversationError(
                "too_large", f"the conversation has {len(ids)} tokens, and the reward model reads {self._most_tokens}: "
                'lower sampling.max_tokens, or set reward.model_too_long = "truncate"',
            )  # fmt: skip
        if not ids:
            raise UnreadableConversationError("bad_job", "the conversation has no tokens")
        return Encoded(ids, encoded.get("token_type_ids", []), is_cut)

    def scores(self, batch: Sequence[Encoded]) -> list[float]:
        """The logit of each conversation. Raises: NoMemoryError; errors of the libraries."""
        try:
            scores: list[float] = self._logits(batch)[:, 0].tolist()
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise NoMemoryError(str(error)) from error
        return scores

    def _logits(self, batch: Sequence[Encoded]) -> torch.Tensor:
        """float32 [B, outputs]."""
        pad = self._pad(batch)
        width = max(len(each.ids) for each in batch)
        ids_BT = torch.full((len(batch), width), pad, dtype=torch.long)
        mask_BT, types_BT = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT)
        for row, each in enumerate(batch):
            ids_BT[row, : len(each.ids)] = torch.tensor(each.ids)
            mask_BT[row, : len(each.ids)] = 1
            types_BT[row, : len(each.types)] = torch.tensor(each.types, dtype=torch.long)
        inputs = {"input_ids": ids_BT, "attention_mask": mask_BT}
        if batch[0].types and self._takes_types:
            inputs["token_type_ids"] = types_BT
        with torch.inference_mode():
            found = self._model(**{name: each.to(self._model.device) for name, each in inputs.items()})
        logits: torch.Tensor = found.logits.float().cpu()
        return logits

    def _pad(self, batch: Sequence[Encoded]) -> int:
        """The id that fills up rows. A decoder reads its score where the last other id stands, so a model that has no pad
        token of its own gets one that none of the rows holds."""
        if self._own_pad is not None:
            return int(self._own_pad)
        used = {token for each in batch for token in each.ids}
        pad = next(token for token in range(len(used) + 1) if token not in used)
        self._config.pad_token_id = self._model.config.pad_token_id = pad
        return pad

    def _encode(self, messages: list[dict[str, Any]], *, cut: bool) -> Any:
        limit = {"truncation": True, "max_length": self._most_tokens} if cut else {}
        if self._options.input == "chat":
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            return self._tokenizer(text, add_special_tokens=False, **limit)
        asked, answer = "\n".join(message["content"] for message in messages[:-1]), messages[-1]["content"]
        if self._options.input == "pair":
            return self._tokenizer(asked, answer, **limit)
        return self._tokenizer(asked + answer, **limit)


def _device(name: str) -> torch.device:
    """The device of its process, which sees one GPU at most. Raises: ValueError."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"reward.model_device is {name}, and there is no such GPU, or this torch is built for CPUs")
    return torch.device("cuda:0")
