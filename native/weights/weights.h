// Installs the products of this folder in ggml: nothing else of it is called from outside, but by the harness.
#pragma once

// Take the place of ggml's products of weights, and put weights on huge pages. LCTX_WEIGHTS=0 in the environment, or as
// a CMake option, leaves both to ggml, except for products that are marked (ops/fixed.h), since contexts promise their
// order.
void lctx_install_weights();

// Change one table of ggml each, for lctx_install_weights. all: false for marked products only.
void lctx_wrap_repacking(bool all);
void lctx_use_huge_pages();
