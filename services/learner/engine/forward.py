"""Forward passes of the policy on a micro-batch, and what is recorded in them or put into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed

from gspo.inputs.validation import trusted_values
from gspo.model.adapter_choice import AdapterChoice
from gspo.model.beginnings import FamilyBoundaries, can_share
from gspo.model.boundaries import Boundaries
from gspo.model.logprobs import Scored, TokenLogProbs
from gspo.model.packing import PackedBatch
from gspo.model.sequence_parallel import RowShare
from gspo.moe.experts import ExpertPicks, ExpertRecorder, ExpertShape
from gspo.moe.load_balance import RouterLogits, load_balancing_loss
from gspo.moe.routing_replay import RoutingReplay
from gspo_services.learner.start import EngineSettings


class ForwardPasses:
    """Log-probs of micro-batches, with the experts that were chosen and the load-balancing loss."""

    def __init__(
        self, engine: Any, settings: EngineSettings, share: RowShare | None, adapters: AdapterChoice | None = None
    ) -> None:
        """Take DeepSpeed's engine. ``share``: this rank's slice of every micro-batch; None: it has them whole.
        ``adapters``: of a model with several."""
        self._engine = engine
        self._settings = settings
        self._share = share
        self._adapters = adapters
        self._experts = ExpertRecorder(engine.module)
        self._balance = RouterLogits(engine.module) if settings.load_balance_coefficient > 0 else None
        self._replay = RoutingReplay(engine.module) if settings.routing_replay else None
        self._num_experts = ExpertShape.of(engine.module).num_experts
        self.shares_beginnings = (
            settings.learner.share_prompts
            and share is None
            and can_share(engine.module.config.to_dict())
            # An engine may know a token's experts in one sequence only; the loss counts a token of each sequence.
            and not settings.replays_engine
            and settings.load_balance_coefficient == 0
            # Flash attention takes whole sequences in one kernel.
            and not (settings.device == "cuda" and settings.learner.dtype != "float32")
        )

    @contextmanager
    def replaying(self, packed: PackedBatch, picks: ExpertPicks | None = None) -> Iterator[None]:
        """Inside, the routers choose the experts that were chosen before for this micro-batch: ``picks``, or those that an
        engine reported, if these are to be replayed. Otherwise as they will.
        """
        if self._settings.replays_engine and packed.experts_TLK is not None:
            picks = ExpertPicks(packed.experts_TLK.transpose(0, 1), self._num_experts)
        if picks is None:
            yield
            return
        assert self._replay is not None, "experts to replay need settings.routing_replay"
        own = picks if self._share is None else self._share.own_picks(picks)
        if packed.shared is not None:
            own = ExpertPicks(picks.indices_LTK[:, packed.shared.firsts_U], picks.num_experts)
        replay = self._replay.replaying(own, partial=self._settings.replays_engine)
        with ExitStack() as stack:
            # To read them, the host would wait for the device in every micro-batch.
            with trusted_values():
                stack.enter_context(replay)
            yield

    def forward(self, packed: PackedBatch, with_entropy: bool) -> TokenLogProbs:
        """Run the model on a micro-batch, on the engine's device; training passes ask for entropies. Collective."""
        inputs = model_inputs(packed, self._share)
        if self._adapters is not None:
            own = packed.adapters_T
            if own is not None and self._share is not None:
                own = self._share.own_row(own)
            if own is not None and packed.shared is not None:
                own = own[packed.shared.firsts_U]
            self._adapters.choose(own, inputs["input_ids"].shape[-1], packed.targets_T.device)
        # Only training passes have a loss to add it to.
        balance = self._balance if with_entropy else None
        with self._experts.recording(), nullcontext() if balance is None else balance.recording():
            result: TokenLogProbs = self._engine(
                **inputs,
                with_entropy=with_entropy,
                entropy_gradient=with_entropy and self._settings.entropy_gradient,
            )
        if balance is not None:
            auxiliary = load_balancing_loss(balance.take(), balance.top_k)
            result = result._replace(balance_loss=self._settings.load_balance_coefficient * auxiliary)
        own_experts = None if self._replay is None else self._replay.take_own()
        experts = self._experts.take()
        if experts is not None and packed.shared is not None:
            experts = ExpertPicks(experts.indices_LTK[:, packed.shared.places_T], experts.num_experts)
        result = result._replace(experts=experts, own_experts=own_experts)
        return result if self._share is None else self._share.whole(result, packed.input_ids.shape[1])


def model_inputs(packed: PackedBatch, share: RowShare | None) -> dict[str, Any]:
    """Return the arguments of the model's forward pass for a micro-batch, or for this rank's slice of it."""
    if share is not None:
        return share.inputs(packed)
    targets: dict[str, Any] = {"targets_T": packed.targets_T, "temperatures_T": packed.temperatures_T}
    row = packed.shared
    if row is None:
        return targets | {
            "input_ids": packed.input_ids,
            "position_ids": packed.position_ids,
            "cu_seqlens": Boundaries(packed.cu_seqlens),
            "scored": Scored(packed.scored_N, packed.scored_N),
        }
    return targets | {
        "input_ids": row.input_ids,
        "position_ids": row.position_ids,
        "cu_seqlens": FamilyBoundaries(row.families),
        "scored": Scored(packed.scored_N, row.places_T[packed.scored_N]),
    }


def own_row_share(size: int, timeout_s: float) -> RowShare | None:
    """This rank's slice of its rows, which it shares with its ``size`` - 1 neighbours; None when it has them whole.

    Collective: each ``size`` ranks in a row become a process group.
    """
    if size == 1:
        return None
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    groups = [
        torch.distributed.new_group(list(range(first, first + size)), timeout=timedelta(seconds=timeout_s))
        for first in range(0, world_size, size)
    ]
    return RowShare(group=groups[rank // size], index=rank % size, size=size)
