"""A pytest plugin for the test suites of llama.cpp's server and of llama-cpp-python: models are local files.

They lie in the folder ``LCTX_PEER_MODELS``. A test whose model is not there is skipped. ``LCTX_PEER_COMPAT=1`` lets
``llama_cpp`` be pylongctx.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(os.environ["LCTX_PEER_MODELS"])


def local(repo_id: str, filename: str, **_: object) -> str:
    """Stand for huggingface_hub.hf_hub_download."""
    path = FOLDER / filename
    if not path.exists():
        pytest.skip(f"no local copy of {repo_id}: {filename}")
    return str(path)


if find_spec("huggingface_hub"):
    import huggingface_hub

    huggingface_hub.hf_hub_download = local

if os.environ.get("LCTX_PEER_COMPAT"):
    from pylongctx import compat

    compat.enable()
else:
    import utils  # of the folder of llama.cpp's tests

    utils.ServerPreset.load_all = staticmethod(lambda: None)  # it would fetch all models before the first test
    utils.download_file = lambda url, _=None: local(url, url.rsplit("/", 1)[-1])
