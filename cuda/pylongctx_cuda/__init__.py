"""The CUDA backend of pylongctx, which finds it here when both are installed: nothing needs to import this package."""
