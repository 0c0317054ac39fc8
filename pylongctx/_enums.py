"""llama.cpp's names for the numbers of its enums."""

from typing import Any

SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}  # how a model is split across devices
ROPE_SCALINGS = {"none": 0, "linear": 1, "yarn": 2}

# how weights are loaded, as arguments of a model
LOAD_MODES: dict[str, dict[str, Any]] = {
    "auto": {},
    "none": {"use_mmap": False},
    "mmap": {"use_mmap": True},
    "mlock": {"use_mmap": False, "use_mlock": True},
    "mmap+mlock": {"use_mmap": True, "use_mlock": True},
}

AUTO_LAYERS = "auto"  # n_gpu_layers: what devices have room for

# policies for a text that does not fit
EVICT_MIDDLE = "evict_middle"
OVERFLOWS = ("error", EVICT_MIDDLE)

# Where K and V are that do not lie close.
HOST, DISK = OFFLOADS = ("host", "disk")
