"""The options of SGLang 0.5.23, by what they do to a policy: its server must sample what the learner computes.

Options were sorted by reading; those with which a run has been compared with the learner are among the harmless ones. A test
holds these names against SGLang's own parser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

QUANTISING_FORMATS: Final = ("flash_rl", "bitsandbytes", "gguf")
"""Values of --load-format: what loads such a format quantises."""
TEXT_ALONE: Final = ("--json-model-override-args", '{"language_model_only": true}')
"""A model that also takes images then serves text, as before: its configuration says nothing else than in its file."""
_LOADED: Final = ("auto", "safetensors", "pt", "fastsafetensors", "runai_streamer")
"""Values of --load-format that read the model's own files."""
_SO: Final = "which also assigns each rank its GPU"
RANKS: Final = {
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size"), f"use rollout.tensor_parallel, {_SO}"),
    **dict.fromkeys(("--ep", "--ep-size", "--expert-parallel-size"), "use rollout.expert_parallel"),
    **dict.fromkeys(("--dp-size", "--data-parallel-size"), f"use rollout.data_parallel, {_SO}"),
    **dict.fromkeys(
        ("--pp-size", "--pipeline-parallel-size"),
        "a server whose layers are spread cannot be verified; use rollout.tensor_parallel",
    ),
    "--nnodes": "its other machines would not find the weights, which lie in this one's memory, and could not be verified; "
    "use rollout.tensor_parallel within a machine, and more rollouts",
}
"""What to use for a value that is not 1."""
_REFUSED: Final[dict[str, str]] = {
    "it changes what is sampled, or from what, and the learner would not know; remove it": """
        is-embedding enable-strict-thinking preferred-sampling-params allow-auto-truncate enable-hisparse hisparse-config
        hierarchical-sparse-attention-extra-config dllm-algorithm dllm-algorithm-config dllm-fdfo no-dllm-fdfo
        enable-watermark watermark-config
    """,
    "it changes the model or where its weights come from, and the learner would train another one; remove it": """
        model-loader-extra-config revision model-config-parser json-model-override-args kt-weight-path kt-method kt-cpuinfer
        kt-threadpool-count kt-num-gpu-experts kt-max-deferred-experts-per-token startup-weight-load-mode
        remote-instance-weight-loader-seed-instance-ip remote-instance-weight-loader-seed-instance-service-port
        remote-instance-weight-loader-send-weights-group-ports remote-instance-weight-loader-backend
        remote-instance-weight-loader-start-seed-via-transfer-engine modelexpress-config decrypted-config-file
        decrypted-draft-config-file checkpoint-engine-wait-weights-before-ready weight-cache-mode weight-cache-socket
        weight-cache-timeout
    """,
    "prompts are rendered by the rollout, with the template of model.path, and the server sees token ids; change "
    "that template": """
        chat-template trust-request-chat-template hf-chat-template-name completion-template default-chat-template-kwargs
        strip-thinking-cache
    """,
    "a draft that proposes tokens keeps its first weights, and log-probs and versions of its tokens were never "
    "compared with the learner's; remove it": """
        speculative-algorithm uno-lora-path speculative-draft-model-path speculative-draft-model
        speculative-draft-model-revision speculative-draft-load-format speculative-num-steps speculative-eagle-topk
        speculative-num-draft-tokens speculative-dflash-block-size speculative-dspark-block-size
        speculative-dspark-sps-table-path speculative-dspark-confidence-sts-path
        speculative-dspark-align-verify-tokens-to-graph-tier speculative-accept-threshold-single
        speculative-accept-threshold-acc speculative-use-rejection-sampling speculative-token-map speculative-attention-mode
        speculative-draft-attention-backend speculative-dsa-topk-backend speculative-draft-kv-cache-dtype
        speculative-draft-window-size speculative-moe-runner-backend speculative-moe-a2a-backend
        speculative-enable-w4a4-mxfp4-megamoe no-speculative-enable-w4a4-mxfp4-megamoe speculative-draft-model-quantization
        enable-multi-layer-eagle speculative-adaptive speculative-adaptive-config decoupled-spec-bind-endpoint
        decoupled-spec-connect-endpoints decoupled-spec-rank decoupled-spec-role spec-trace-dir
        speculative-ngram-min-bfs-breadth speculative-ngram-max-bfs-breadth speculative-ngram-match-type
        speculative-ngram-max-trie-depth speculative-ngram-capacity speculative-ngram-external-corpus-path
        speculative-ngram-external-sam-budget speculative-ngram-external-corpus-max-tokens
        speculative-domino-candidate-pool-size speculative-use-block-verification speculative-draft-sink-size
    """,
    "a server that quantises weights as it loads them does not hold the weights that were sent, so no update "
    'could be verified; remove it, and use model.dtype = "bfloat16" (the KV cache may be quantised: '
    "--kv-cache-dtype)": """
        quantization quantization-param-path modelopt-quant modelopt-checkpoint-restore-path modelopt-checkpoint-save-path
        modelopt-export-path quantize-and-serve rl-quant-profile enable-deepseek-v4-fp4-indexer enable-w4a4-mxfp4-megamoe
    """,
    "it is unknown how SGLang then shares a model, so its shards could not be verified; remove it, and use "
    "tensor_parallel, expert_parallel or data_parallel": """
        dcp-size decode-context-parallel-size attn-dp-size attention-data-parallel-size attn-cp-size
        attention-context-parallel-size moe-dp-size moe-data-parallel-size dwdp-size shared-experts-tp-size
        ep-num-redundant-experts init-expert-location enable-eplb moe-dense-tp-size elastic-ep-backend elastic-ep-join-mode
        elastic-ep-join-rank-offset elastic-ep-initial-size max-ep-size elastic-ep-scale-timeout
        enforce-shared-experts-fusion enable-paged-experts enable-dp-attention
    """,
    "a server that is a part of one cannot be given a version by itself; use whole servers": """
        disaggregation-mode disaggregation-transfer-backend disaggregation-bootstrap-port disaggregation-ib-device
        disaggregation-decode-enable-radix-cache disaggregation-decode-enable-offload-kvcache
        disaggregation-decode-retraction-backup disaggregation-decode-extra-slots disaggregation-decode-polling-interval
        encoder-only language-only encoder-transfer-backend encoder-urls encoder-bootstrap-port encoder-register-urls
        enable-pdmux pdmux-config-path disaggregation-enable-kv-checksum enable-pd-role-switch
        disaggregation-decode-host-receive-threshold disaggregation-decode-allocation-policy
    """,
    "use the settings of [lora]": """
        enable-lora lora-paths
    """,
    "the rollout would not reach such a server: it speaks plain HTTP with one process on this machine; remove it": """
        tokenizer-worker-num use-ray fastapi-root-path smg-grpc-mode grpc-mode enable-http2 ssl-keyfile ssl-certfile
        ssl-ca-certs ssl-keyfile-password api-key admin-api-key
    """,
    "the rollout sets it; remove it": """
        model-path model node-rank weight-version
    """,
    "what such a file sets is not seen here; write its options in server_args": """
        config
    """,
    "it deletes the model's files; remove it": """
        delete-ckpt-after-loading
    """,
}
"""By the reason."""
_HARMLESS: Final = """
    help tokenizer-path tokenizer-mode tokenizer-backend skip-tokenizer-init load-format trust-remote-code context-length
    dtype kv-cache-dtype enable-fp32-lm-head mem-fraction-static max-running-requests max-queued-requests
    max-total-tokens chunked-prefill-size prefill-decode-interval enable-dynamic-chunking max-prefill-tokens
    prefill-max-requests schedule-policy schedule-low-priority-values-first retraction-policy schedule-conservativeness
    page-size swa-full-tokens-ratio disable-hybrid-swa-memory radix-eviction-policy radix-eviction-policy-config
    disable-radix-cache disable-chunked-prefix-cache disable-overlap-schedule num-continuous-decode-steps
    scheduler-recv-interval enable-mixed-chunk nccl-port dist-timeout dist-init-addr nccl-init-addr load-balance-method
    enable-p2p-check device base-gpu-id gpu-id-step random-seed watchdog-timeout soft-watchdog-timeout sleep-on-idle
    numa-node gc-threshold host port skip-server-warmup warmups served-model-name file-storage-path enable-cache-report
    sampling-defaults stream-interval batch-notify-size incremental-streaming-output log-level log-level-http
    log-requests log-requests-level log-requests-format log-requests-target uvicorn-access-log-exclude-prefixes
    crash-dump-folder show-time-cost enable-metrics enable-mfu-metrics enable-metrics-for-all-schedulers
    tokenizer-metrics-custom-labels-header tokenizer-metrics-allowed-custom-labels extra-metric-labels
    bucket-time-to-first-token bucket-inter-token-latency bucket-e2e-request-latency prompt-tokens-buckets
    generation-tokens-buckets gc-warning-threshold-secs decode-log-interval enable-request-time-stats-logging
    kv-events-config enable-trace trace-modules otlp-traces-endpoint export-metrics-to-file export-metrics-to-file-dir
    constrained-json-whitespace-pattern constrained-json-disable-any-whitespace constrained-json-max-whitespace-cnt
    attention-backend decode-attention-backend prefill-attention-backend grammar-backend radix-cache-backend
    mm-attention-backend bf16-gemm-backend dsa-prefill-backend dsa-decode-backend dsa-topk-backend
    disable-flashinfer-autotune flashinfer-autotune-skip-ops mamba-backend cuda-graph-config cuda-graph-backend-decode
    cuda-graph-backend-prefill cuda-graph-max-bs-decode cuda-graph-max-bs-prefill cuda-graph-bs-decode
    cuda-graph-bs-prefill cuda-graph-prefill-max-context context-bucket disable-prefill-cuda-graph
    disable-decode-cuda-graph disable-cuda-graph-padding enable-profile-cuda-graph enable-cudagraph-gc debug-cuda-graph
    enable-layerwise-nvtx-marker enable-nccl-nvls enable-symm-mem triton-attention-reduce-in-fp32
    triton-attention-num-kv-splits triton-attention-split-tile-size flashinfer-mla-disable-ragged
    disable-custom-all-reduce enable-mscclpp enable-torch-symm-mem pre-warm-nccl enable-torch-compile
    enable-torch-compile-debug-mode torch-compile-max-bs moe-a2a-backend moe-runner-backend deepep-mode deepep-config
    disable-shared-experts-fusion max-mamba-cache-size mamba-ssm-dtype mamba-full-memory-ratio mamba-radix-cache-strategy
    mamba-track-interval linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend
    linear-attn-verify-backend enable-hierarchical-cache enable-hicache hicache-host-memory-mode hicache-ratio
    hicache-size hicache-write-policy hicache-io-backend hicache-mem-layout hicache-storage-backend
    hicache-storage-prefetch-policy hicache-storage-backend-extra-config hicache-storage-prefetch-retry-poll-interval
    hicache-storage-prefetch-retry-max-attempts enable-lora-overlap-loading max-lora-rank lora-target-modules
    max-loaded-loras max-loras-per-batch lora-eviction-policy lora-backend max-lora-chunk-size lora-drain-wait-threshold
    enable-two-batch-overlap enable-single-batch-overlap tbo-token-distribution-threshold custom-weight-loader
    weight-loader-disable-mmap weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads
    weight-loader-drop-cache-after-load download-dir model-checksum enable-prefill-delayer
    prefill-delayer-max-delay-passes prefill-delayer-token-usage-low-watermark prefill-delayer-forward-passes-buckets
    prefill-delayer-wait-seconds-buckets prefill-delayer-queue-min-ratio prefill-delayer-max-delay-ms
    enable-deterministic-inference rl-on-policy-target enable-dynamic-batch-tokenizer dynamic-batch-tokenizer-batch-size
    dynamic-batch-tokenizer-batch-timeout enable-tokenizer-batch-encode disable-tokenizer-batch-decode
    debug-tensor-dump-output-folder debug-tensor-dump-layers debug-tensor-dump-input-file enable-memory-saver
    enable-weights-cpu-backup enable-custom-logit-processor enable-return-routed-experts disable-outlines-disk-cache
    cuda-graph-max-seq-len-prefill otlp-service-name hicache-host-memory-fraction prefill-decode-interval-min-bs
    sampling-backend reasoning-parser tool-call-parser disable-cuda-graph
"""
_UNTRIED: Final = """
    detokenizer-worker-num enable-multimodal model-impl enable-tf32-matmul no-enable-tf32-matmul
    enable-priority-scheduling disable-priority-preemption default-priority-value abort-on-priority-when-disabled
    priority-scheduling-preemption-threshold c128-page-size prefill-only-disable-kv-cache enable-page-major-kv-layout
    enable-unified-memory gated-launch-port pp-max-micro-batch-size pp-async-batch-depth dcp-comm-backend
    dcp-replicate-q-proj no-dcp-replicate-q-proj enable-prefill-cp cp-strategy enable-dsa-cache-layer-split
    enable-cp-decode-attn-tp enable-kv-cache-sharding enable-dp-attention-local-control-broadcast enable-dp-lm-head
    enable-tp-lm-head-all-to-all no-enable-tp-lm-head-all-to-all enable-attn-tp-input-scattered
    enable-shared-experts-attn-tp enable-dense-mlp-attn-tp enable-layernorm-sp disable-attn-tp-gather mlx-enable-sampling
    grpc-port sidecar sidecar-args http2-max-concurrent-streams http2-initial-connection-window-size enable-ssl-refresh
    return-input-ids return-output-ids tool-server asr-max-buffer-seconds asr-max-concurrent-sessions
    stream-response-default-include-usage enable-streaming-session enable-session-radix-cache smg-http-sidecar-port
    grpc-http-sidecar-port load-snapshot-publish-interval load-publish-endpoint enable-forward-pass-metrics
    forward-pass-metrics-worker-id forward-pass-metrics-ipc-name enable-lean-attention fp8-gemm-backend fp4-gemm-backend
    dsv4-prefill-backend dsa-paged-mqa-logits-backend enable-fused-qk-norm-rope no-enable-fused-qk-norm-rope
    enable-precise-embedding-interpolation enable-fused-moe-sum-all-reduce enable-scattered-sconv boundary-reduction
    enable-quant-communications enforce-disable-flashinfer-allreduce-fusion flashinfer-allreduce-fusion-backend
    enable-aiter-allreduce-fusion deepep-v2-mode flashinfer-mxfp4-moe-precision fuseep-mode
    deepep-dispatcher-output-dtype ep-dispatch-algorithm eplb-algorithm eplb-rebalance-num-iterations
    eplb-rebalance-layers-per-chunk eplb-min-rebalancing-utilization-threshold expert-distribution-recorder-mode
    expert-distribution-recorder-buffer-size expert-balancedness-report-mode enable-elastic-expert-backup
    mooncake-ib-device enable-waterfill disable-flashinfer-cutlass-moe-fp4-allgather mamba-max-states-per-path
    enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds enable-int8-mamba-checkpoint int8-mamba-ckpt-size
    enable-linear-replayssm linear-replayssm-cache-len enable-linear-replayssm-spec enable-unified-cache-external-linker
    unified-cache-external-linker-backend enable-broadcast-mm-inputs-process enable-prefix-mm-cache mm-enable-dp-encoder
    no-mm-enable-dp-encoder mm-process-config mm-processor-worker-num mm-io-worker-num allowed-media-domains
    media-url-max-file-size-mb mm-preprocess-cache-size-mb trust-mm-content-hashes limit-mm-data-per-request
    enable-mm-global-cache image-processor-backend mm-global-cache-backend disable-fast-image-processor
    mm-feature-transport experts-shared-outer-loras no-experts-shared-outer-loras lora-use-virtual-experts
    lora-strict-loading no-lora-strict-loading cpu-offload-gb offload-group-size offload-num-in-group
    offload-prefetch-step offload-mode enable-lmcache lmcache-config-file enable-flexkv flexkv-config-file
    num-reserved-decode-tokens optimistic-prefill-attempts language-model-only enable-adaptive-dispatch-to-encoder
    sm-group-num engine-info-bootstrap-port min-free-slots-delay kv-canary kv-canary-sweep-interval
    enable-draft-weights-cpu-backup enable-return-hidden-states return-hidden-states-mode enable-return-indexer-topk
    sampling-mask-max-tokens enable-mis forward-hooks msprobe-dump-config ple-offload-embedding no-ple-offload-embedding
    ple-offload-backend ple-offload-dir flashinfer-a2a-dispatch-type prefill-kv-cache-dequant-dtype dsv4-attn-backend
    enable-linker-mla-dedup swa-prefix-tails enable-encoder-swa-bounded-replay enable-decoder-swa-bounded-replay
    no-enable-decoder-swa-bounded-replay enable-response-store qsa-indexer-dtype
    disable-aiter-allreduce-fusion-in-prefill disable-aiter-allreduce-fusion-in-decode enable-amd-monokernel
    dsa-triton-union enable-dsa-fused-indexer no-enable-dsa-fused-indexer grpc-response-timeout-secs
    paged-experts-num-resident enable-nvidia-megakernel enable-megamoe-for-layernorm-sp enable-http-worker-reuseport
    unified-cache-external-linker-config enable-return-aux-hidden-states return-aux-hidden-state-layer-ids
    kv-canary-real-data monokernel-backend enable-flashinfer-allreduce-fusion
"""


def _names(text: str) -> list[str]:
    return [f"--{name}" for name in text.split()]


REFUSED_OPTIONS: Final[Mapping[str, str]] = {name: reason for reason, text in _REFUSED.items() for name in _names(text)}
HARMLESS: Final = frozenset(_names(_HARMLESS))
UNTRIED: Final = frozenset(_names(_UNTRIED))
KNOWN: Final = frozenset({*REFUSED_OPTIONS, *HARMLESS, *UNTRIED, *RANKS})


def objection(arguments: Sequence[str]) -> str:
    """Why a server with these arguments would not be the learner's policy; empty when nothing is known against it."""
    for name, value in _options(arguments):
        if name in RANKS and value != "1":
            return f"{name} {value}: {RANKS[name]}"
        if name in REFUSED_OPTIONS:
            return f"{name}: {REFUSED_OPTIONS[name]}"
        if name == "--load-format" and value not in _LOADED:
            return f"{name} {value}: {REFUSED_OPTIONS['--quantization' if value in QUANTISING_FORMATS else '--revision']}"
    return ""


def untried(arguments: Sequence[str]) -> list[str]:
    """The options of which it is not known whether they leave the policy as it is."""
    return [name for name, _ in _options(arguments) if name in UNTRIED or name not in KNOWN]


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each option with its value, or what follows it. Parsers take the beginning of a name for the name."""
    for index, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        name, equals, value = argument.partition("=")
        meant = [known for known in KNOWN if known.startswith(name)]
        name = meant[0] if name not in KNOWN and len(meant) == 1 else name
        yield name, value if equals else next(iter(arguments[index + 1 :]), "")
