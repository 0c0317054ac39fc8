// Declares which layers our cache takes from llama.cpp's own memory while that is being built.
#pragma once

#include <cstdint>

// A layer with full attention. source: the layer whose rows it reads, which is itself unless layers share them.
struct lctx_claimed {
    int32_t il, source;
};
