"""A store of texts that were read, on disk: any later process goes on where one has been."""

from pylongctx.store.store import KVStore, StoreUsage

__all__ = ["KVStore", "StoreUsage"]
