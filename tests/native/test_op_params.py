"""Numbers in the op_params of ggml's nodes are where native/ops/params.h reads them: compared with ggml itself."""

import re
from pathlib import Path

import numpy as np
import pytest
from needs import lacks

pytestmark = pytest.mark.check

NATIVE = Path(__file__).resolve().parents[2] / "native"
OURS = {"ops/params.h", "ops/fixed.h", "ops/nodes.h", "ops/ops.cpp"}  # the last two: nodes of GGML_OP_LCTX
SUB_OP = re.compile(r"\bop_params\[0\]")  # which sub-op a node of GGML_OP_LCTX is
MROPE, IMROPE = 8, 40
FLOATS = [
    *(f"rope_{name}" for name in ("freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")),
    *("scale_factor", "scale_bias", "norm_eps", "gate_alpha", "gate_limit"),
]


def harness():
    try:
        import op_harness
    except ImportError as error:
        lacks("build", str(error))
    return op_harness


@pytest.mark.parametrize(("mode", "offset", "dim", "hint"), [(MROPE, 6, 0, 1), (IMROPE, 0, 2, 0)])
def test_numbers_are_read_where_ggml_puts_them(mode, offset, dim, hint):
    run = harness()
    rng = np.random.default_rng(mode)
    op = run.ffi.new("lctx_op_args *")
    args = run.ffi.new("lctx_params_args *", {"op": op, "rope_sections": [7, 5, 3, 2]})
    given = {"rope_mode": mode, "rope_dims": 34, "rope_n_ctx_orig": 4099, "rope_offset": offset}
    given |= {"concat_dim": dim, "has_hint": hint}
    given |= {name: float(np.float32(rng.uniform(0.1, 9))) for name in FLOATS}
    where = {name: op if hasattr(op, name) else args for name in given}
    for name, value in given.items():
        setattr(where[name], name, value)
    run.call(run.lib.lctx_params_run, args)
    assert {name: getattr(where[name], name) for name in given} == given
    assert list(args.rope_sections) == [7, 5, 3, 2]
    assert list(args.is_fixed) == [0, 0]


def test_op_params_are_read_in_one_place():
    """Elsewhere only the sub-op of a node of ours is."""
    found = set()
    for path in [path for kind in ("*.h", "*.cpp", "*.cu") for path in NATIVE.rglob(kind)]:
        code = SUB_OP.sub("", re.sub(r"//.*", "", path.read_text()))
        if "op_params" in code.replace("ggml_get_op_params", "op_params"):
            found.add(path.relative_to(NATIVE).as_posix())
    assert found == OURS
