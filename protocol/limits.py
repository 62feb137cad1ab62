"""Limits on everything that a peer can send. A message over a limit is refused with the limit's name and value."""

from typing import Final, NamedTuple

PROTOCOL_VERSION: Final = 2

MAX_HEADER_BYTES: Final = 1024 * 1024
"""The header of most messages; also bounds tasks and environment states."""
MAX_LARGE_HEADER_BYTES: Final = 16 * 1024 * 1024
"""The header of messages that describe very many things: a batch's trajectories, a version's tensors, a run's status."""
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
MAX_FRAMES: Final = 64
MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024
MAX_ARRAY_DIMENSIONS: Final = 4

MAX_NAME_CHARS: Final = 128
MAX_REASON_CHARS: Final = 4096
MAX_STATE_BYTES: Final = 256 * 1024
"""An environment's state, which travels with every chunk."""
MAX_ENTRY_BYTES: Final = 256 * 1024
"""One entry of a trajectory's journal..."""
MAX_ENTRIES: Final = 16_384
MAX_JOURNAL_BYTES: Final = 8 * 1024 * 1024
"""...and all of them, which travel with every lease of the trajectory."""
MAX_PLAIN_DEPTH: Final = 64
"""Levels of lists and maps in tasks, environment states, journals and a run's status."""
MAX_CHUNK_TOKENS: Final = 1_000_000
MAX_CHUNK_FRAME_BYTES: Final = 4 * MAX_CHUNK_TOKENS
"""A chunk's token ids, log-probs or experts."""
MAX_EXPERT_BYTES: Final = 1024
"""A token's experts over all layers, where an engine reports them (``gspo_protocol.messages.experts``)."""
MAX_CHUNKS_PER_MESSAGE: Final = 256
MAX_GATHERED_TOKENS: Final = 32_768
"""Tokens of all chunks of one message. With its columns, segments, runs and states it stays below MAX_HEADER_BYTES, which is
room that every rollout has besides the tokens of its longest chunk."""
MAX_TURNS: Final = 4096
"""Turns of one trajectory; fewer where a batch has very many trajectories (``trajectory_limits``)."""
MAX_ROLES: Final = 16
"""Roles that the policy may play in one episode."""
MAX_ADAPTERS: Final = 16
"""Adapters of one model that a run trains at once."""
MAX_ADAPTER_NAME: Final = 32
MAX_SEQUENCES: Final = 256
"""Sequences of one trajectory: the broker stores a little of each with every chunk."""
MAX_VERSION: Final = 2**32
"""A policy version. A trajectory's sum of versions stays within 64 bits, and every number within what JSON readers hold."""
MAX_VERSION_STEP: Final = 1_000_000
"""Largest step from one published version to the next."""
MAX_VOCABULARY: Final = 2**31 - 1
"""Token ids travel as int32."""
MAX_REWARD: Final = 1e6
"""Sum of the absolute rewards of one trajectory's turns: no sum, variance or gradient that follows from it can overflow."""
MAX_COMPONENTS: Final = 16
"""Named components of one trajectory's reward; each becomes a metric."""
MAX_TEMPERATURE: Final = 10.0
"""Largest sampling temperature."""
MIN_LOGPROB: Final = -1e4
"""No sampler in float32 draws a token that is less likely."""
MAX_LEASES_PER_MESSAGE: Final = 4096
MAX_TRAJECTORIES_PER_BATCH: Final = 65_536
MAX_BATCH_TOKENS: Final = 2**32
"""Tokens of a batch: no message holds them all, but whoever is told of a batch makes room for its share of them."""
MAX_PART_TOKENS: Final = 2**20
"""Tokens of one part of a batch: with a segment and a version run for each, its arrays have 40 MiB."""
MAX_PARTS_AHEAD: Final = 16
"""Parts of a batch that one request may ask for."""
MAX_TENSORS: Final = 2_000_000
MAX_WEIGHT_CHUNK_BYTES: Final = 1024 * 1024
MAX_DELTA_BUCKET_ELEMENTS: Final = 4 * 1024 * 1024
"""Elements of a version encoded together: bounds the memory that a bucket takes while it is applied."""
MAX_DELTA_BUCKETS: Final = 262_144
"""Buckets of one delta: as many as a manifest has room for; 2 TiB of weights."""
MAX_SOURCES: Final = 16
"""Rollouts that a manifest names as sources of the same bytes."""
MAX_WEIGHT_PARTS: Final = 4096
"""Parts of one version: ranks of a learner."""
MAX_PROBE_TOKENS: Final = 256
"""Tokens of the sequence whose log-probs show whether an engine applies an adapter."""
MAX_PROBED: Final = 2048
"""Tokens of a version's probe whose log-probs are compared."""
MAX_CONFIG_CHARS: Final = 65_536
"""Characters of a model's configuration beside a probe."""
MAX_METRICS: Final = 4096
MAX_SET_NAME: Final = 64
"""Characters of the name of an evaluation set."""
MAX_EVALUATIONS: Final = 65_536
"""Evaluations of a run that a learner is told of at once."""
MAX_BATCHES_REQUEUED: Final = 4096
"""Batches that one RequeueRequest names."""

MAX_PEERS: Final = 4096
"""Sessions that a broker or weight server keeps."""
MAX_RETRY_S: Final = 3600.0
MAX_OPERATORS: Final = 256
"""Places of a broker that only operators can have; there is one for the learner, and the others are for rollouts."""
MAX_ROLLOUTS_PER_KEY: Final = 1024
MAX_OPERATORS_PER_KEY: Final = 64
"""Sessions of one key: when these are taken, the one that was silent for longest makes room."""
MAX_LEASES_PER_PEER: Final = 4096
"""Leases of one rollout: as many as one Heartbeat can renew."""
WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Bytes of unacknowledged messages after which their sender waits; the message that reaches this may be of any size."""
MAX_QUEUED: Final = 16_384
"""Messages received and not yet handled in one broker..."""
MAX_QUEUED_BYTES: Final = 256 * 1024 * 1024
"""...and their bytes. Above either, messages of the peers with the most of them are dropped unacknowledged."""
MAX_UNSEQUENCED: Final = 64
"""Messages of one peer, beyond its window, that wait to be handled: requests, heartbeats and Hellos need no credit."""
BAD_MESSAGES_BURST: Final = 32
"""Undecodable messages that a connection may send at once..."""
BAD_MESSAGES_PER_S: Final = 1.0
"""...and how many of them are forgiven in a second. A connection that sends more is ignored for IGNORED_S seconds."""
HELLOS_BURST: Final = 32
HELLOS_PER_S: Final = 2.0
"""The same for Hellos: an honest peer says one each second until it is answered."""
UNWANTED_BURST: Final = 4096
UNWANTED_PER_S: Final = 512.0
"""The same for messages without a session, above a peer's credit, or that need none: an honest peer sends its window again
every three seconds, and some requests."""
SHUT_OUT_S: Final = 60.0
"""Seconds for which a key is refused after one of its connections held too much."""
PAUSE_S: Final = 5.0
"""Seconds without new connections from a host, after one from there was cut for a flood or an excess."""
IGNORED_S: Final = 10.0
CURVE_OVERHEAD_BYTES: Final = 1024
"""ZeroMQ applies a frame limit to the encrypted frame, which is a little longer."""

TURNS_PER_BATCH: Final = 2**20
"""Turns of a batch's trajectories together: a batch's rewards and sequences fit the frames of its message."""
SEGMENTS_PER_TURN: Final = 2
RUNS_PER_TURN: Final = 4
"""Two more than its segments need, for versions that change during a turn."""
MAX_SEGMENTS: Final = SEGMENTS_PER_TURN * MAX_TURNS
MAX_RUNS: Final = RUNS_PER_TURN * MAX_TURNS
"""Segments and version runs of one chunk, which travel in its header."""
MAX_TASK_BYTES: Final = MAX_HEADER_BYTES // 2
"""A task, as msgpack: it travels with every lease, together with the state."""


class TrajectoryLimits(NamedTuple):
    """What one trajectory may consist of, so that any batch of them fits a message. Segments and runs count as merged."""

    turns: int
    segments: int
    runs: int


def trajectory_limits(num_trajectories: int) -> TrajectoryLimits:
    """Return the limits of one of ``num_trajectories`` trajectories of a batch."""
    turns = min(MAX_TURNS, TURNS_PER_BATCH // num_trajectories)
    return TrajectoryLimits(turns, SEGMENTS_PER_TURN * turns, RUNS_PER_TURN * turns)
