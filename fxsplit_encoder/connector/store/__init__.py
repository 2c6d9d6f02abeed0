"""Features that one process of this host offers by their content, and others read.

A store owns memory, which its readers map once; what they hold of it comes back when they release it or end.
All stores that belong together have their sockets in one private directory, in which readers find them.
"""

from fxsplit_encoder.connector.store.reader import StoreReader
from fxsplit_encoder.connector.store.store import FeatureStore, StoreStats
from fxsplit_encoder.connector.store.stores import Found, Stores

__all__ = ["FeatureStore", "Found", "StoreReader", "StoreStats", "Stores"]
