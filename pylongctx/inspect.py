"""The former name of ``pylongctx.attention``."""

raise ImportError("pylongctx.inspect is now pylongctx.attention")
