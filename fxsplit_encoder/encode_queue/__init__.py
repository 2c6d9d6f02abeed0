"""Batches on worker threads: `EncodeQueue` forms them from items, `BatchThread` launches and lands them."""

from fxsplit_encoder.encode_queue.batch_thread import BatchThread
from fxsplit_encoder.encode_queue.queue import BatchHandle, EncodeQueue, QueueStats

__all__ = ["BatchHandle", "BatchThread", "EncodeQueue", "QueueStats"]
