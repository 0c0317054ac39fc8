"""Layers on RPC servers of models whose memory has parts: recurrent states, windows, sinks, latent vectors."""

import pytest
from session import Session, assert_same
from test_devices import ALL, SIZES, TOLERANCE, endpoints, play  # noqa: F401
from test_models import make
from thinning import thin

NAMES = ("qwen3next", "gemma4", "gpt-oss", "deepseek2")
METHODS = {
    "full": "full",
    "longheads": "longheads,chunk_size=16,window=64,representation=minmax",
    "corm": "corm,window=8,recent=24,evict_every=16",
}


@thin
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_layer", [ALL, 2])
def test_layers_elsewhere_are_the_same(ffi, lib, tmp_path, endpoints, tokens, name, method, n_layer):  # noqa: F811
    path, there = make(tmp_path, name), {"rpc_servers": ",".join(endpoints), "n_gpu_layers": n_layer}
    results = []
    for where in ({}, there):
        with Session(ffi, lib, path, METHODS[method], where=where, **SIZES) as session:
            results.append(play(session, tokens))
    for here, elsewhere in zip(*results, strict=True):
        assert_same(elsewhere, here, TOLERANCE)
