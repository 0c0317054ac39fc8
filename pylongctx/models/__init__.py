"""The model bundled with the package: 4.5 M parameters, trained context 512, enough to demonstrate methods."""

from importlib import resources
from pathlib import Path


def embedded_model() -> Path:
    """Return the path of the embedded GGUF model."""
    return Path(str(resources.files("pylongctx.models") / "pylongctx-tiny-q8_0.gguf"))
