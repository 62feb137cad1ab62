"""The learner of a run that several brokers share, against scripted brokers over real ZeroMQ."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from prometheus_client import CollectorRegistry

from protocol.channels import BATCH
from protocol.messages import (
    Batch,
    BatchPartRequest,
    BatchPending,
    BatchRequest,
    Checkpointed,
    EndOfRun,
    Heartbeat,
    Hello,
    Published,
    Refused,
    Resume,
    SkipBatch,
    StopRequest,
    Trained,
)
from services.learner.broker.batches import Answer, BatchAnnounced, PartArrived
from services.learner.broker.parts import CREDIT, MOST_DAMAGED
from services.learner.broker.shares import merged_answers
from services.learner.broker.thread import BrokerThread
from services.learner.metrics import LearnerMetrics
from services.learner.weights.copying import WeightCopy, copy_weights
from services.runtime.clock import MonotonicClock
from services.runtime.errors import ServiceError, flatten
from services.runtime.settings.sections import BatchSection, Broker, Learner, Settings
from services.runtime.telemetry import Health
from tests.support.broker.made_batches import MadeBatch, damaged
from tests.support.learner.shares import a_share, answers_of_share
from tests.support.wire.zmq_ends import ANY_PORT, ScriptedEnd, zmq_context

OFTEN_S = 0.05
NUM_BROKERS = 3
VOCABULARY = 256
