"""The plan of a Llama that is not opened: what its arguments would take."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from pylongctx import _arguments as arguments
from pylongctx.llama import Llama
from pylongctx.planning import Plan


def plan_of(path: str, method: str, threads: tuple[int, int], given: Mapping[str, Any]) -> Plan:
    """Return the plan of a model with a method and some arguments of Llama; the others have their defaults.

    Raises
    ------
    InvalidInput
        When the library refuses the model.
    """
    every = {name: part.default for name, part in signature(Llama).parameters.items()} | {"model_path": path, **given}
    settings = arguments.context_settings(every, threads)
    return Plan(path, arguments.model_settings(every), settings, method)
