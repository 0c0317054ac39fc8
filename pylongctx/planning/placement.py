"""What devices hold of a model, if that is left to the library: layers, and the experts of layers."""

from collections.abc import Mapping
from typing import Any

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

    def sizes(where: Mapping[str, Any]) -> list[Sizes]:
        with Plan(path, {**model_settings, **where}, settings, method) as plan:
            return plan.sizes(**({} if settings["n_ctx"] else {"n_ctx": min(plan.n_ctx(), LEAST_N_CTX)}))[1:]

    def without_experts(n: int) -> dict[str, Any]:
        elsewhere = {first_layers(n, EXPERTS): "CPU"} if n else {}
        return {"override_tensor": {**model_settings["override_tensor"], **elsewhere}}

    def works(where: Mapping[str, Any]) -> bool:
        return all(_has_room(size) for size in sizes(where))

    with quiet():
        try:
            devices = sizes({})
        except InvalidInput as reason:
            nothing = {"n_gpu_layers": 0}
            sizes(nothing)  # raises if the CPU cannot compute it either
            return model_settings | nothing, f"no layers are on devices: {reason}"
        if not devices:
            return model_settings | {"n_gpu_layers": 0}, ""
        with Plan(path, model_settings, settings, method) as plan:
            n_layer = plan.info.n_layer
        where: dict[str, Any] = {}
        held, others = f"all {n_layer + 1} layers", ""
        if not works(where):
            if works(without_experts(n_layer)):
                n = n_layer - most(n_layer, lambda n: works(without_experts(n_layer - n)))
                where, others = without_experts(n), f"; the experts of {n} of them are on the CPU"
            else:
                n = most(n_layer, lambda n: works({"n_gpu_layers": n}))
                where, held, others = {"n_gpu_layers": n}, f"{n} of {n_layer + 1} layers", "; the others are on the CPU"
    free = (f"{size.device}" + (f" ({bytes_text(size.free)} free)" if size.free else "") for size in devices)
    return model_settings | where, f"{held} are on {', '.join(free)}{others}"


def _has_room(size: Sizes) -> bool:
    return size.free is None or size.total <= size.free - min(MARGIN, size.free // SMALL)
