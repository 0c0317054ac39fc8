"""Options of rotary positions, spelled as llama.cpp spells them."""

from pylongctx._enums import ROPE_SCALINGS
from pylongctx.cli.arguments import Options, integer, number
from pylongctx.cli.values import rope_scaling

YARN = {
    "ext-factor": "extrapolation mix factor",
    "attn-factor": "attention magnitude factor",
    "beta-slow": "high correction dim, or alpha",
    "beta-fast": "low correction dim, or beta",
}


def add_rope_options(options: Options, extended: bool = False) -> None:
    """Add base and scale of RoPE; if ``extended``, also its kind and YaRN's numbers."""
    add = options.add
    add("--rope-freq-base", parse=number, metavar="X", env="LLAMA_ARG_ROPE_FREQ_BASE", help="RoPE base (the model's)")
    add(
        "--rope-freq-scale", parse=number, metavar="X", env="LLAMA_ARG_ROPE_FREQ_SCALE", help="RoPE scale (the model's)"
    )
    if not extended:
        return
    names = f"{{{','.join(ROPE_SCALINGS)}}}"
    add(
        "--rope-scaling",
        parse=rope_scaling,
        metavar=names,
        env="LLAMA_ARG_ROPE_SCALING_TYPE",
        help="RoPE scaling (the model's)",
    )
    add("--rope-scale", parse=number, metavar="X", env="LLAMA_ARG_ROPE_SCALE", help="1 / --rope-freq-scale")
    add("--yarn-orig-ctx", parse=integer, env="LLAMA_ARG_YARN_ORIG_CTX", help="trained context (the model's)")
    for name, meaning in YARN.items():
        option, variable = f"--yarn-{name}", "LLAMA_ARG_YARN_" + name.upper().replace("-", "_")
        add(option, parse=number, metavar="X", env=variable, help=f"YaRN's {meaning}")
