"""Asynchronous encoding above the manager: media in, features at their placeholder tokens out.

Nothing here needs a package that only an extra installs; what does is imported by its module: encoders
in other processes (`processes`). Processors of media are in `fxsplit_encoder.models.preprocess`.
"""

from fxsplit_encoder.connector.books.books import Step
from fxsplit_encoder.connector.books.encoding import WorkerStatus
from fxsplit_encoder.connector.books.tickets import Ticket
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.fake import FakeEncoder, FakeProcessor, fake_rows
from fxsplit_encoder.connector.interfaces import (
    PIXEL_TABLE,
    DeviceEncoder,
    FeatureEncoder,
    MediaItem,
    MediaProcessor,
    MediaReducer,
    PreparedItem,
    PrioritizedEncoder,
    ProcessorByModality,
    PromptProcessor,
    PromptRun,
    SlicingEncoder,
    StagingEncoder,
    TypedEncoder,
)
from fxsplit_encoder.connector.keys import TowerIdentity
from fxsplit_encoder.connector.manager_encoder import ManagerEncoder
from fxsplit_encoder.connector.positions import (
    FeatureRows,
    MergedRows,
    Placeholder,
    Placeholders,
    PositionMap,
)
from fxsplit_encoder.connector.request import (
    FAIL,
    RETRY,
    SPECIFIED_BATCHES,
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
    "SPECIFIED_BATCHES",
    "TEXT_ONLY",
    "TRANSITIONS",
    "Availability",
    "Connector",
    "ConnectorConfig",
    "ConnectorStats",
    "DeviceEncoder",
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
    "MediaReducer",
    "MergedRows",
    "Placeholder",
    "Placeholders",
    "PositionMap",
    "PreparedItem",
    "PrioritizedEncoder",
    "ProcessorByModality",
    "PromptProcessor",
    "PromptRun",
    "Residence",
    "SlicingEncoder",
    "StagingEncoder",
    "State",
    "Step",
    "Ticket",
    "TowerIdentity",
    "TypedEncoder",
    "WorkerStatus",
    "fake_rows",
]
