"""A store of KV caches on disk, from which later processes continue."""

from pylongctx.store.store import KVStore, StoreUsage

__all__ = ["KVStore", "StoreUsage"]
