"""What devices hold of a model, if that is left to the library: layers, and the experts of layers."""

from collections.abc import Mapping
from typing import Any

from pylongctx._arguments import has_gpu
from pylongctx._lib import InvalidInput
from pylongctx._units import bytes_text
from pylongctx.model_files.overrides import EXPERTS, first_layers
from pylongctx.planning.plan import Plan, Sizes, most
from pylongctx.planning.preflight import quiet

LEAST_N_CTX = 4096  # tokens for which devices have room if the context may have any length
MARGIN = 2**30  # bytes of a device for other programs, and for what its backend allocates later
SMALL = 8  # small devices leave this part of their free memory instead


def place(
    path: str, model_settings: dict[str, Any], settings: dict[str, Any], method: str
) -> tuple[dict[str, Any], str]:
    """Return the settings of a model of which devices hold as much as fits, and a line that says how much.

    All layers, if they fit; else all layers without the experts of as many of them as necessary; else fewer layers.
    The order, the smallest context and the margin are those of llama.cpp's ``--fit``. If devices cannot compute what is
    asked for, they hold nothing.

    Raises
    ------
    InvalidInput
        When the library refuses the model or the settings.
    """

    nothing = {"n_gpu_layers": 0}
    if not has_gpu() and not model_settings.get("rpc_servers"):
        return model_settings | nothing, ""
    with quiet(), Plan(path, model_settings, settings, method) as plan:
        try:
            devices = _on_devices(plan)
        except InvalidInput as reason:
            with plan.moved(**nothing) as other:
                other.sizes()  # raises if the CPU cannot compute it either
            return model_settings | nothing, f"no layers are on devices: {reason}"
        where, held, others = _chosen(plan, devices)
    free = (f"{size.device}" + (f" ({bytes_text(size.free)} free)" if size.free else "") for size in devices)
    return model_settings | where, f"{held} are on {', '.join(free)}{others}"


def _chosen(plan: Plan, devices: list[Sizes]) -> tuple[dict[str, Any], str, str]:
    """Return where the model goes, the layers that devices hold, and what they do not hold; ``devices``: with all."""
    n_layer, given = plan.info.n_layer, plan.model_settings["override_tensor"]

    def without_experts(n: int) -> dict[str, Any]:
        return {"override_tensor": {**given, first_layers(n, EXPERTS): "CPU"}}

    def works(where: Mapping[str, Any]) -> bool:
        with plan.moved(**where) as other:
            return _have_room(_on_devices(other))

    if _have_room(devices):
        return {}, f"all {n_layer + 1} layers", ""
    if works(without_experts(n_layer)):
        n = n_layer - most(n_layer - 1, lambda n: works(without_experts(n_layer - n)))
        return without_experts(n), f"all {n_layer + 1} layers", f"; the experts of {n} of them are on the CPU"
    n = most(n_layer, lambda n: works({"n_gpu_layers": n}))
    return {"n_gpu_layers": n}, f"{n} of {n_layer + 1} layers", "; the others are on the CPU"


def _on_devices(plan: Plan) -> list[Sizes]:
    """Return the sizes on the devices; a context that may have any length has the least one."""
    changes = {} if plan.settings["n_ctx"] else {"n_ctx": min(plan.n_ctx(), LEAST_N_CTX)}
    return plan.sizes(**changes)[1:]


def _have_room(devices: list[Sizes]) -> bool:
    return all(size.free is None or size.total <= size.free - min(MARGIN, size.free // SMALL) for size in devices)
