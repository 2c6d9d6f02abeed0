"""Asynchronous encoding above the manager: media in, features at their placeholder tokens out.

Encoders in other processes, which need an extra, are imported by their module, `processes`.
"""

from fxsplit_encoder.connector.books.books import Step
from fxsplit_encoder.connector.books.encoding import WorkerStatus
from fxsplit_encoder.connector.books.tickets import Ticket
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.fake import FakeEncoder, FakeProcessor, fake_rows
from fxsplit_encoder.connector.interfaces import (
    PIXEL_TABLE,
    FeatureEncoder,
    MediaItem,
    MediaProcessor,
    PreparedItem,
    ProcessorByModality,
    PromptRun,
)
from fxsplit_encoder.connector.keys import TowerIdentity
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.positions import FeatureRows, MergedRows, Placeholder, PositionMap
from fxsplit_encoder.connector.request import (
    FAIL,
    RETRY,
    TEXT_ONLY,
    ConnectorConfig,
    EncodeRequest,
    FailurePolicy,
)
from fxsplit_encoder.connector.states import FAILURE_KINDS, TRANSITIONS, Availability, Residence, State
from fxsplit_encoder.connector.statistics import ConnectorStats, Durations

__all__ = [
    "FAIL",
    "FAILURE_KINDS",
    "PIXEL_TABLE",
    "RETRY",
    "TEXT_ONLY",
    "TRANSITIONS",
    "Availability",
    "Connector",
    "ConnectorConfig",
    "ConnectorStats",
    "Durations",
    "EncodeRequest",
    "FailurePolicy",
    "FakeEncoder",
    "FakeProcessor",
    "FeatureEncoder",
    "FeatureRows",
    "ManagerEncoder",
    "MediaItem",
    "MediaProcessor",
    "MergedRows",
    "Placeholder",
    "PositionMap",
    "PreparedItem",
    "ProcessorByModality",
    "PromptRun",
    "Residence",
    "State",
    "Step",
    "Ticket",
    "TowerIdentity",
    "WorkerStatus",
    "fake_rows",
]
