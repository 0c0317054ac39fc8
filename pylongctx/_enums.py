"""llama.cpp's words for the numbers of its enums."""

SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}  # how a model is split among devices
ROPE_SCALINGS = {"none": 0, "linear": 1, "yarn": 2}

# what happens to a text that does not fit
EVICT_MIDDLE = "evict_middle"
OVERFLOWS = ("error", EVICT_MIDDLE)
