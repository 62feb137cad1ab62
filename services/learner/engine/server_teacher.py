"""The teacher of an engine, where it is a server: scores a batch's sequences ahead, and answers from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.model.packing import PackedBatch
from gspo_services.learner.teacher import RefusedSequenceError, ScoreRecord, TeacherError, TeacherServer, key_of

log = structlog.get_logger()


class ServerTeacher:
    """One rank's. Every sequence of a run is asked for once; see ``ScoreRecord``."""

    def __init__(self, server: TeacherServer, record: ScoreRecord) -> None:
        self._server = server
        self._record = record
        self._known: dict[bytes, NDArray[np.float32]] = {}

    def prepare_on_all(self, micro_batches: Iterable[PackedBatch], sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """``prepare`` on each rank, which fails on all of them if it does on one. Collective.

        What a batch is to blame for is raised on all ranks as such: only rank 0 tells the broker.
        Raises: RefusedSequenceError, or ValueError, as ``prepare``; else TeacherError.
        """
        failure: Exception | None = None
        try:
            self.prepare(micro_batches)
        except (TeacherError, RefusedSequenceError, ValueError) as error:
            failure = error
        blames_batch = failure is not None and not isinstance(failure, TeacherError)
        any_failed, any_blames = sum_over_ranks(torch.tensor([float(failure is not None), float(blames_batch)])).tolist()
        if any_blames and not blames_batch:
            raise RefusedSequenceError(
                "the teacher does not score a sequence that another rank has: that rank's log says why"
            )
        if any_failed:
            raise failure or TeacherError("the teacher did not answer another rank (distillation.teacher)")

    def prepare(self, micro_batches: Iterable[PackedBatch]) -> None:
        """Score the sequences of this rank's share of a batch, before any of it is trained, and forget those of the last.

        What was scored before another sequence failed is kept.
        Raises: TeacherError; RefusedSequenceError; ValueError for a temperature that servers do not score at.
        """
        wanted: dict[bytes, list[int]] = {}
        for packed in micro_batches:
            if not packed.is_empty and not bool((packed.temperatures_T == 1).all()):
                raise ValueError(
                    f"a sequence was sampled at temperature {float(packed.temperatures_T.max())}, and a server scores at 1; "
                    "let distillation.teacher be a directory"
                )
            wanted |= {self._key(ids): ids.tolist() for ids in _sequences(packed)}
        self._known = self._record.find(wanted)
        missing = {key: ids for key, ids in wanted.items() if key not in self._known}
        if missing:
            new: dict[bytes, NDArray[np.float32]] = {}
            try:
                self._server.score(missing, new)
            finally:
                self._record.add(new)
            self._known |= new
            log.debug("teacher_scored", sequences=len(new), known=len(wanted) - len(new))

    def logprobs(self, packed: PackedBatch) -> Tensor:
        """float32 [T], as ``FrozenModel.logprobs``, on the device of the batch; 0 where there is no target. The micro-batch
        is one of those prepared."""
        rows = [np.append(self._known[self._key(ids)], np.float32(0)) for ids in _sequences(packed)]
        return torch.from_numpy(np.concatenate(rows)).to(packed.input_ids.device)

    def _key(self, token_ids: NDArray[np.int64]) -> bytes:
        return key_of(self._server.name, token_ids)


def _sequences(packed: PackedBatch) -> Iterator[NDArray[np.int64]]:
    ids_T = packed.input_ids[0].cpu().numpy()
    for begin, end in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
        if not packed.is_empty:
            yield ids_T[begin:end]
