"""The learner's model and optimizer in DeepSpeed: forward passes, optimizer steps, weights. No sockets.

Every method marked collective must be called by all ranks in the same order with as many micro-batches.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from gspo.model.adapter_choice import AdapterChoice
from gspo.model.logprobs import TokenLogProbs
from gspo.model.lora import freeze_all_but_lora, inject_lora
from gspo.model.packing import PackedBatch
from gspo.model.policy import load_policy, prepare_policy
from gspo.model.serving_layout import ServedParameter
from gspo.model_files.configuration import read_config
from gspo.moe.bias_balance import BiasBalance
from gspo.moe.experts import ExpertShape
from gspo_protocol.limits import MAX_CONFIG_CHARS
from gspo_protocol.messages import Probe
from gspo_protocol.messages.experts import ModelExperts
from gspo_services.learner.checkpoints import EngineCopy, canary_batch, require_canary, write_canary
from gspo_services.learner.engine.biased_experts import fitting_layers
from gspo_services.learner.engine.client_steps import ClientSteps
from gspo_services.learner.engine.configuration import deepspeed_config, parameter_groups, rate_factor, stage_inside
from gspo_services.learner.engine.expert_parallel import expert_shares, keep_names
from gspo_services.learner.engine.forward import ForwardPasses, own_row_share
from gspo_services.learner.engine.frozen import FrozenModel
from gspo_services.learner.engine.gradients import (
    MissingGradientError,
    NonFiniteGradientError,
    NonFiniteLossError,
    WholeGradients,
    gradients_of,
)
from gspo_services.learner.engine.host_states import HostStates
from gspo_services.learner.engine.lora import lora_layout, lora_plan, trained_parameters
from gspo_services.learner.engine.optimizer_state import OPTIMIZER, OptimizerState
from gspo_services.learner.engine.own_ranges import PublishedRanges
from gspo_services.learner.engine.partitioned_loading import placement_of
from gspo_services.learner.engine.probing import probe_batch
from gspo_services.learner.engine.process_group import init_distributed, limit_waiting
from gspo_services.learner.engine.server_teacher import ServerTeacher
from gspo_services.learner.engine.step import LossFn, ReplayFn, StepResult, micro_batch_loss
from gspo_services.learner.engine.weights import EngineWeights
from gspo_services.learner.profiling import NO_PROFILE, ModelCost, Phases, model_cost
from gspo_services.learner.start import (
    EngineSettings,
    parallelism_of,
    position_limit,
    require_adaptable,
    require_sequence_parallel,
    require_supported,
)
from gspo_services.learner.teacher import ScoreRecord, TeacherServer
from gspo_services.learner.weights import DTYPES


class LearnerEngine:
    """A policy in training. ``create`` or ``from_model`` makes one, ``close`` ends it."""

    def __init__(
        self,
        engine: Any,
        settings: EngineSettings,
        reference: FrozenModel | None = None,
        model_dir: Path | None = None,
        teacher: FrozenModel | ServerTeacher | None = None,
    ) -> None:
        self._engine = engine
        self.settings = settings
        self.model: Any = engine.module
        self.device = torch.device(engine.device)
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self.max_tokens_per_micro_batch = settings.learner.max_tokens_per_micro_batch
        # A longer sequence that arrives is refused by name: the model would train on positions that it does not have.
        self.max_sequence_tokens = settings.max_sequence_tokens or position_limit(self.model.config.to_dict())
        self._shares = expert_shares(self.model)
        self._lora, self._model_dir = lora_plan(settings.lora), model_dir
        trained = trained_parameters(self.model, self._lora)
        self._stage = stage_inside(settings)
        self._gradients = gradients_of(
            engine, trained, self._shares, configured_stage=settings.learner.zero_stage, stage=self._stage
        )
        self.sequence_parallel = settings.learner.sequence_parallel
        self._share = own_row_share(self.sequence_parallel, settings.learner.collective_timeout_s)
        choice = AdapterChoice(self.model, self._lora) if self._lora and self._lora.num_adapters > 1 else None
        self._passes = ForwardPasses(engine, settings, self._share, choice)
        self.shares_beginnings = self._passes.shares_beginnings
        self._balance = BiasBalance(self.model, settings.expert_bias_rate) if settings.expert_bias_rate > 0 else None
        self._state = OptimizerState(engine, self._stage, self._shares, trained=None if self._lora is None else trained)
        self._coverage_known = False
        self._reference, self._teacher = reference, teacher
        frozen = [each for each in (reference, teacher) if isinstance(each, FrozenModel)]
        states = HostStates(engine, frozen, self.device)
        # Between two turns on a device; nothing else may be called between the two.
        self.leave_device, self.return_to_device = states.leave, states.come_back
        self.profile: Phases = NO_PROFILE
        self._weights = EngineWeights(
            self.model, self._shares, rank=self.rank, num_ranks=self.world_size, has_lora=self._lora is not None
        )
        self._base_digest = self._weights.base_digest(self.broadcast)

    @classmethod
    def create(cls, model_dir: Path, settings: EngineSettings) -> LearnerEngine:
        """Load the model of ``model_dir`` on all ranks; with ZeRO-3 no rank ever holds all of it. Collective.

        Raises: ValueError, before loading and on all ranks, when the model cannot be trained with these settings (see
        ``require_supported``) or its files, or those of a frozen model, are not whole.
        """
        if settings.learner.threads:
            torch.set_num_threads(settings.learner.threads)
        init_distributed(settings.device, settings.learner.collective_timeout_s)
        model_config = read_config(model_dir)
        _require_supported(model_config, settings)
        reference = _load_frozen(model_dir, settings) if settings.keeps_reference else None
        teacher = _teacher(settings)
        model = load_policy(model_dir, DTYPES[settings.learner.dtype], placement_of(settings, model_config))
        return cls.from_model(model, settings, reference, model_dir=model_dir, teacher=teacher)

    @classmethod
    def from_model(
        cls,
        model: Any,
        settings: EngineSettings,
        reference: FrozenModel | None = None,
        *,
        model_dir: Path | None = None,
        teacher: FrozenModel | ServerTeacher | None = None,
    ) -> LearnerEngine:
        """Train a model that is in memory, the same on all ranks. Changes the model in place. Collective.

        ``model_dir``: where it was read from, for checkpoints that refer to it.
        """
        init_distributed(settings.device, settings.learner.collective_timeout_s)
        model_config = model.config.to_dict()
        _require_supported(model_config, settings)
        torch.manual_seed(settings.seed)
        prepare_policy(
            model,
            logprob_chunk_tokens=settings.learner.logprob_chunk_tokens,
            activation_checkpointing=settings.learner.activation_checkpointing,
            checkpoints_on_host=settings.learner.activation_offload,
            mlp_tiles=settings.learner.mlp_tiles,
            float32_head=settings.float32_head,
            fused_head=settings.learner.fused_head,
        )
        plan = lora_plan(settings.lora)
        if plan is not None:
            inject_lora(model, plan, seed=settings.seed)
        warmup = max(1, settings.learner.warmup_steps)
        with fitting_layers(model.config.model_type):
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=parameter_groups(model, settings.learner),
                config=deepspeed_config(settings, model_config),
                # DeepSpeed's own warm-up trains its first two steps at a learning rate of 0.
                lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup)),
                dist_init_required=False,
            )
        limit_waiting(settings.learner.collective_timeout_s)
        keep_names(engine.module, model.config.model_type)
        if plan is not None:
            # DeepSpeed creates new experts where ranks share them.
            freeze_all_but_lora(engine.module)
        made = cls(engine, settings, reference, model_dir, teacher)
        if settings.learner.dtype == "bfloat16" and settings.learner.spread_masters:
            made._state.spread(settings.seed, evenly=settings.learner.spread_masters == "evenly")
        return made

    def logprobs(self, packed: PackedBatch, *, with_entropy: bool = False) -> TokenLogProbs:
        """Log-probs of one micro-batch under the current weights, without gradient. Collective."""
        packed = packed.to(self.device)
        with torch.no_grad(), self._passes.replaying(packed):
            return self._passes.forward(packed, with_entropy)

    def reference_logprobs(self, packed: PackedBatch) -> Tensor:
        """Log-probs of one micro-batch under the frozen start model, float32 [T]; needs ``keeps_reference``."""
        assert self._reference is not None, "a reference needs settings.keeps_reference"
        return self._reference.logprobs(packed.to(self.device), self._share)

    def teacher_logprobs(self, packed: PackedBatch) -> Tensor:
        """Log-probs of one micro-batch under the teacher, float32 [T]; needs ``EngineSettings.teacher`` or a server's."""
        assert self._teacher is not None, "a teacher needs settings.teacher or settings.teacher_server"
        if isinstance(self._teacher, ServerTeacher):
            return self._teacher.logprobs(packed).to(self.device)
        return self._teacher.logprobs(packed.to(self.device), self._share)

    def prepare_teacher(self, micro_batches: Iterable[PackedBatch]) -> None:
        """Let a teacher that is a server score this rank's share of a batch, before its first step. Collective with one.

        Raises: as ``ServerTeacher.prepare_on_all``.
        """
        if isinstance(self._teacher, ServerTeacher):
            self._teacher.prepare_on_all(micro_batches, self.sum_over_ranks)

    @property
    def vocabulary(self) -> int:
        """The number of the model's token ids, from 0."""
        return int(self.model.config.vocab_size)

    @property
    def model_experts(self) -> ModelExperts | None:
        """What messages must have of the experts that engines report; None: nothing that they could have."""
        shape = self.engine_experts
        if shape is None:
            return None
        experts = ModelExperts(shape.num_layers, shape.top_k, shape.num_experts)
        return experts if experts.is_encodable else None

    @property
    def replays_routing(self) -> bool:
        """Whether batches are trained with the experts of their start, which ``train_mini_batch`` then takes."""
        return self.settings.routing_replay and not self.settings.replays_engine

    @property
    def engine_experts(self) -> ExpertShape | None:
        """What the experts must be like that engines report, and that all passes then replay; None: none are replayed."""
        return ExpertShape.of(self.model) if self.settings.replays_engine else None

    @property
    def balances_load(self) -> bool:
        """Whether training passes have a ``balance_loss``."""
        return self.settings.load_balance_coefficient > 0

    def train_mini_batch(
        self,
        micro_batches: Sequence[PackedBatch],
        loss_fn: LossFn,
        *,
        num_still: int = 0,
        replay: ReplayFn | None = None,
        rate_scale: Callable[[], float] | None = None,
    ) -> StepResult:
        """Make one optimizer step on the sum of the micro-batches' losses over all ranks. Collective.

        Args:
            micro_batches: this rank's; equally many on every rank, some of them possibly empty.
            loss_fn: not called for an empty micro-batch.
            num_still: the first so many have a loss without a gradient, and get no backward pass; fewer than there are, and
                alike on every rank.
            replay: the experts of each micro-batch; only with ``replays_routing``.
            rate_scale: the factor of this step's learning rate, asked for after the last micro-batch; alike on every rank.

        Raises: NonFiniteLossError, NonFiniteGradientError or, in the first step, MissingGradientError, on all ranks together
        and before the step.
        """
        if num_still >= len(micro_batches):
            raise ValueError("a mini-batch needs at least one micro-batch with a gradient, which may be empty")
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        # Ranks that share their rows count them once.
        counts = self._share is None or self._share.index == 0
        for index, micro_batch in enumerate(micro_batches):
            packed = micro_batch.to(self.device)
            self._engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            # Backward is inside, because it computes checkpointed activations again.
            with self._passes.replaying(packed, None if replay is None else replay(packed)):
                with torch.set_grad_enabled(index >= num_still):
                    with self.profile.phase("forward"):
                        result = self._passes.forward(packed, with_entropy=True)
                    if self._balance is not None and counts:
                        self._balance.count(result.experts, packed.mask_T)
                    with self.profile.phase("loss"):
                        loss = micro_batch_loss(packed, result, loss_fn)
                if index >= num_still:
                    with self.profile.phase("backward"):
                        # DeepSpeed averages over ranks; the loss is a sum. Ranks that share a row have its loss each, and a
                        # gradient of their own slice of it.
                        self._engine.backward(loss * self.world_size, scale_wrt_gas=False)
            if counts:
                totals[0] += loss.detach()
                totals[1] += packed.num_tokens
                totals[2] += packed.num_computed_tokens
        with self.profile.phase("optimizer"):
            loss_sum, num_tokens, num_computed = self._sound_totals(totals)
            if rate_scale is not None:
                # The schedule sets the rate again after the step.
                factor = rate_scale()
                for group in self._engine.optimizer.param_groups:
                    group["lr"] *= factor
            learning_rate = float(self._engine.get_lr()[0])
            grad_norm = self._step()
            if self._balance is not None:
                self._balance.step(self.sum_over_ranks)
        return StepResult(
            loss=loss_sum,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_tokens=int(num_tokens),
            num_computed_tokens=int(num_computed),
        )

    def client_steps(self) -> ClientSteps:
        """Return this engine to be led step by step by clients, instead of ``train_mini_batch``.

        Raises: ValueError unless it is one rank that trains adapters in float32 without ZeRO inside, and replays no experts.
        """
        if not isinstance(self._gradients, WholeGradients) or self._lora is None or self._lora.num_adapters > 1:
            raise ValueError(
                'clients train on one rank with learner.zero_stage = 1, learner.dtype = "float32", learner.offload = '
                '"none" and adapters of one shape (lora.rank, no lora.adapters)'
            )
        if self.settings.routing_replay or self._balance is not None or self.settings.load_balance_coefficient > 0:
            raise ValueError(
                "clients' losses have no batch: set objective.routing_replay = false, load_balance_coefficient = 0 and "
                "expert_bias_rate = 0"
            )
        return ClientSteps(self._engine, trained_parameters(self.model, self._lora), self._gradients)

    def set_learning_rate(self, value: float) -> None:
        """Set AdamW's learning rate from the next step on, before warm-up. The same on every rank."""
        scheduler = self._engine.lr_scheduler
        groups = self._engine.optimizer.param_groups
        scheduler.base_lrs = [value * rate_factor(group, self.settings.learner) for group in groups]
        self._resume_schedule(scheduler.last_epoch)

    def _sound_totals(self, own_totals: Tensor) -> tuple[float, float, float]:
        """Return loss, tokens and computed tokens of all ranks, if every gradient is sound. One sum and wait. Collective."""
        findings = self._gradients.take(self.device)
        summed = self.sum_over_ranks(torch.cat([own_totals, findings.double().flatten()])).tolist()
        (loss, num_tokens, num_computed), counts = summed[:3], summed[3:]
        received, non_finite = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the loss over all ranks is {loss}; no step was made")
        bad = [name for name, count in zip(self._gradients.names, non_finite, strict=True) if count]
        if bad:
            raise NonFiniteGradientError(f"{len(bad)} parameters have non-finite gradients: {_some(bad)}; no step was made")
        if self._coverage_known:
            return loss, num_tokens, num_computed
        pairs = zip(self._gradients.names, received, strict=True)
        missing = [name for name, count in pairs if count < self.world_size]
        if missing:
            raise MissingGradientError(
                f"{len(missing)} of {len(received)} parameters got no gradient: {_some(missing)}; "
                "they are frozen or cut off from the loss; no step was made"
            )
        self._coverage_known = True
        return loss, num_tokens, num_computed

    def _step(self) -> float:
        before = self._gradients.clip(self.settings.learner.max_grad_norm)
        self._engine.step()
        grad_norm = float(self._engine.get_global_grad_norm()) if before is None else before
        if not math.isfinite(grad_norm):
            raise NonFiniteGradientError(f"the gradient norm over all ranks is {grad_norm}; the weights are corrupt")
        return grad_norm

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Return the element-wise sum of every rank's tensor; a new tensor on the engine's device. Collective."""
        summed = tensor.detach().to(self.device, copy=True, non_blocking=True)
        torch.distributed.all_reduce(summed)
        return summed

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """Return the tensor of rank ``source``; the other ranks pass one of the same shape and type. Collective."""
        received = tensor.detach().to(self.device, copy=True, non_blocking=True)
        torch.distributed.broadcast(received, src=source)
        return received

    def barrier(self) -> None:
        """Return when all ranks have called it. Collective."""
        torch.distributed.barrier()

    def serving_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of ``served_parameters``, one by one. Collective."""
        return (pair for each in self.served_parameters(dtype) for pair in each.tensors())

    def served_parameters(self, dtype: torch.dtype | None = None) -> Iterator[ServedParameter]:
        """Yield all weights as engines load them; ranks other than 0 get nothing and must exhaust it. Collective."""
        return self._weights.served(dtype)

    def own_ranges(self, dtype: torch.dtype) -> PublishedRanges:
        """This rank's ranges of what versions have. See ``PublishedRanges``."""
        return self._weights.own(dtype)

    def base_parameters(self, dtype: torch.dtype) -> Iterator[ServedParameter]:
        """``served_parameters`` without adapters. Collective."""
        return self._weights.base(dtype)

    def adapter_parameters(self, dtype: torch.dtype) -> Iterator[ServedParameter]:
        """The adapters alone; ranks other than 0 get nothing and must exhaust it. Collective."""
        return self._weights.adapters(dtype)

    def probe(self) -> tuple[list[int], list[float]]:
        """Return tokens, and the log-probs of all but the first, which an engine must match; those of several adapters one
        after another. Collective."""
        # SGLang misreports the log-prob of the highest id in a prompt.
        return canary_batch(self.vocabulary - 1).input_ids[0].tolist(), self._logprobs_of_canary(self.vocabulary - 1)

    def version_probe(self, num_tokens: int) -> Probe:
        """Return what an engine must compute of a sequence of so many tokens with these weights; with the first of several
        adapters. Collective."""
        packed = probe_batch(num_tokens, self.vocabulary)
        logprobs = self.logprobs(packed).logprobs_T.cpu()[packed.mask_T].tolist()
        return Probe(num_tokens, self.vocabulary, logprobs, self.settings.learner.dtype, self._told_config)

    @cached_property
    def _told_config(self) -> str:
        """The model's config.json for a probe: read once, as each version has one."""
        config = "" if self._model_dir is None else json.dumps(read_config(self._model_dir))
        return config if len(config) <= MAX_CONFIG_CHARS else ""

    def weights_digest(self) -> str:
        """Return the hexadecimal digest of the trained weights: the same in any layout, on every rank. Collective."""
        return self._weights.digest(self.broadcast)

    def cost(self) -> ModelCost:
        """Return the cost of a token, for a profile."""
        every_parameter = OptimizerState(self._engine, self._stage, self._shares)
        return model_cost(every_parameter.shapes(), self.model.config.to_dict())

    def layout(self) -> dict[str, Any]:
        """Return, as plain JSON values, what a checkpoint and the engine that loads it must share."""
        shapes = hashlib.blake2b(digest_size=16)
        for name, shape in sorted(self._state.shapes().items()):
            shapes.update(f"{name}\0{shape}\n".encode())
        return {
            "model": type(self.model).__name__,
            "parameters": shapes.hexdigest(),
            "dtype": self.settings.learner.dtype,
            "optimizer": OPTIMIZER,
            **lora_layout(self._lora, self.settings.lora.adapters, self._model_dir, self._base_digest),
        }

    def save_state(self, directory: Path) -> list[Path]:
        """Write weights, Adam's moments and the number of steps into ``directory``, and make it. Collective.

        Every rank writes its part of the parameters. Raises: OSError, after the last collective, on ranks that could not.
        """
        canary = self._logprobs_of_canary(self.vocabulary)
        written = self._state.save(directory)
        return [*written, write_canary(directory, canary)] if self.rank == 0 else written

    def copy_state(self, directory: Path) -> EngineCopy:
        """Copy what ``save_state`` would write, and compute the digest of the weights, to be written into ``directory``
        while training continues. Parts that exceed ``learner.checkpoint_copy_gib`` are written now. Collective."""
        # Of all ranks of this machine.
        room = self.settings.learner.checkpoint_copy_gib * 2**30 / self.settings.learner.num_ranks
        state = self._state.copy(directory, room)
        return EngineCopy(
            rank=self.rank,
            canary=self._logprobs_of_canary(self.vocabulary),
            files=state.copied,
            written=state.written,
            failure=state.failure,
            num_steps=self._state.num_steps,
            digest=self._weights.local_digest().hex(),
        )

    def load_state(self, directory: Path) -> None:
        """Read what ``save_state`` wrote, on any layout of ranks. Collective.

        Learning rate, betas and the like come from the settings, not from the checkpoint; warm-up continues at its step.
        Raises: CheckpointError when the files do not hold the state of this model, or it computes other log-probs now.
        """
        self._state.load(directory)
        self._resume_schedule(self._state.num_steps)
        require_canary(directory, self._logprobs_of_canary(self.vocabulary), self.settings.learner.dtype)

    def _logprobs_of_canary(self, vocabulary: int) -> list[float]:
        """With each adapter, one after another."""
        logprobs: list[float] = []
        for adapter in range(self.settings.lora.num_adapters):
            packed = canary_batch(vocabulary, adapter)
            logprobs += self.logprobs(packed).logprobs_T.cpu()[packed.mask_T].tolist()
        return logprobs

    def _resume_schedule(self, num_steps: int) -> None:
        scheduler = self._engine.lr_scheduler
        scheduler.last_epoch = num_steps
        for group, base, rise in zip(
            self._engine.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * rise(num_steps)

    def close(self) -> None:
        """Leave the process group. Collective."""
        self._engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _teacher(settings: EngineSettings) -> FrozenModel | ServerTeacher | None:
    address = settings.teacher_server
    if address is not None:
        server = TeacherServer(address.url, timeout_s=address.timeout_s)
        return ServerTeacher(server, ScoreRecord(address.scores, torch.distributed.get_rank(), address.earlier))
    return None if settings.teacher is None else _load_frozen(settings.teacher, settings)


def _load_frozen(model_dir: Path, settings: EngineSettings) -> FrozenModel:
    device = torch.device("cuda", torch.cuda.current_device()) if settings.device == "cuda" else torch.device("cpu")
    learner = settings.learner
    return FrozenModel.load(
        model_dir,
        DTYPES[learner.dtype],
        device,
        logprob_chunk_tokens=learner.logprob_chunk_tokens,
        float32_head=settings.float32_head,
        fused_head=learner.fused_head,
    )


def _require_supported(model_config: Mapping[str, Any], settings: EngineSettings) -> None:
    plan = parallelism_of(
        model_config,
        num_ranks=torch.distributed.get_world_size(),
        expert_parallel=settings.learner.expert_parallel,
        routing_replay=settings.routing_replay,
        load_balance=settings.load_balance_coefficient > 0,
        scales_routers=settings.learner.router_rate_factor != 1,
        moves_biases=settings.expert_bias_rate > 0,
    )
    require_supported(plan)
    require_adaptable(model_config, settings.lora, settings.learner, moves_biases=plan.moves_biases)
    together = settings.learner.sequence_parallel
    require_sequence_parallel(model_config, together, num_ranks=plan.num_ranks, load_balance=plan.load_balance)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
