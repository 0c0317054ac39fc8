#include "weights.h"

#include <cstdlib>
#include <cstring>

void lctx_install_weights() {
    const char * wanted = getenv("LCTX_WEIGHTS");
    const bool all = wanted ? strcmp(wanted, "0") != 0 : LCTX_WEIGHTS;
    lctx_wrap_repacking(all);
    if (all) {
        lctx_use_huge_pages();
    }
}

namespace {

// Install when the library is loaded, before anything is allocated: programs that do not come through lctx.h get the
// same products. This file is linked as an object, so that no linker leaves it out of llama.cpp's tools, as it does
// with a member of a static library.
[[maybe_unused]] const bool INSTALLED = [] {
    lctx_install_weights();
    return true;
}();

}  // namespace
