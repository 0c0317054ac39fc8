// Buffers of the CPU as ggml allocates them, on huge pages where the system has them: a token reads all weights once,
// and with pages of 4 KiB their addresses take as long to look up as a tenth of the bytes. Weights that are mapped from
// a file are not in such a buffer.
#include "weights.h"

#include "../platform/memory.h"
#include "ggml-backend-impl.h"

#include <cstddef>
#include <cstdint>

namespace {

constexpr size_t HUGE_PAGE = (size_t)2 << 20, WORTH = 4 * HUGE_PAGE;

ggml_backend_buffer_t (*alloc_plain)(ggml_backend_buffer_type_t, size_t);

// Nothing is written there yet, so no page is there that would have to be moved.
ggml_backend_buffer_t alloc_huge(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = alloc_plain(type, size);
    if (buffer && size >= WORTH) {
        const auto base = (uintptr_t)ggml_backend_buffer_get_base(buffer);
        const uintptr_t first = GGML_PAD(base, HUGE_PAGE), end = (base + size) / HUGE_PAGE * HUGE_PAGE;
        lctx_pages_prefer_huge((char *)first, end - first, true);
    }
    return buffer;
}

}  // namespace

void lctx_use_huge_pages() {
    ggml_backend_buffer_type_t type = ggml_backend_cpu_buffer_type();
    alloc_plain = type->iface.alloc_buffer;
    type->iface.alloc_buffer = alloc_huge;
}
