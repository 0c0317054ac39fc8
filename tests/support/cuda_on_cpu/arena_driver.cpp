// native/cuda/arena.cu on memory of the CPU: grains, and copies of pieces that lie apart. Prints what was wrong; nothing when all is right.
#include "native/cuda/arena.cu"

#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>

// ---- what arena.cu takes of ggml ----

ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t buft, ggml_backend_buffer_i i, void * context, size_t size) {
    return new ggml_backend_buffer{i, buft, context, size, GGML_BACKEND_BUFFER_USAGE_ANY};
}
ggml_backend_dev_t ggml_backend_buft_get_device(ggml_backend_buffer_type_t buft) {
    return buft->device;
}
ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t) {
    return nullptr;
}
const char * ggml_backend_reg_name(ggml_backend_reg_t) {
    return "CUDA";
}
void ggml_backend_dev_get_props(ggml_backend_dev_t, ggml_backend_dev_props * props) {
    *props = {};
}
size_t ggml_nbytes(const ggml_tensor * t) {
    return t->ne[0];
}
void ggml_abort(const char *, int, const char * text, ...) {
    printf("aborted: %s\n", text);
    exit(1);
}

// ---- the test ----

static void expect(bool ok, const char * what) {
    if (!ok) {
        printf("%s\n", what);
    }
}

static void copy_apart(ggml_backend_buffer_t buffer, char * data) {
    constexpr size_t SIZE = 5, N = 7, APART = 13, APART_HERE = 11;
    ggml_tensor t = {};
    t.data = data, t.ne[0] = 3 + N * APART;
    uint8_t from[N * APART_HERE], back[N * APART_HERE] = {};
    std::iota(from, from + sizeof(from), (uint8_t)1);
    memset(data, 0, t.ne[0]);
    n_copies_made = 0;
    buffer->iface.set_tensor_2d(buffer, &t, from, 3, SIZE, N, APART, APART_HERE);
    buffer->iface.get_tensor_2d(buffer, &t, back, 3, SIZE, N, APART, APART_HERE);
    expect(n_copies_made == 2, "pieces were copied one by one");
    for (size_t i = 0; i < (size_t)t.ne[0]; i++) {
        const size_t piece = (i - 3) / APART, at = (i - 3) % APART;
        const bool is_set = i >= 3 && at < SIZE;
        expect((uint8_t)data[i] == (is_set ? from[piece * APART_HERE + at] : 0), "a byte on the device is another one");
    }
    for (size_t i = 0; i < sizeof(back); i++) {
        expect(back[i] == (i % APART_HERE < SIZE ? from[i] : 0), "a byte that came back is another one");
    }
}

int main() {
    ggml_backend_buffer_type buft = {};
    ggml_backend_device device = {};
    buft.device = &device;
    expect(lctx_cuda_memory.grain(&buft) == GRAIN, "the grain is another one");

    const std::unique_ptr<lctx_device_range> range(lctx_cuda_memory.reserve(&buft, 9 * GRAIN - 1));
    const std::unique_ptr<ggml_backend_buffer> buffer(range->new_buffer());
    expect(range->committed() == 0, "memory was committed at once");
    expect(range->commit(2 * GRAIN - 1, 2 * GRAIN + 1) && range->committed() == 2 * GRAIN, "not two grains around a border");
    copy_apart(buffer.get(), (char *)buffer->iface.get_base(buffer.get()) + 2 * GRAIN - 20);
    range->give_back(GRAIN + 1, 3 * GRAIN);
    expect(range->committed() == GRAIN, "a grain that is not whole was given back");

    const ggml_backend_buffer_t pinned = lctx_cuda_memory.pinned_buffer(&buft, 4096);
    copy_apart(pinned, (char *)pinned->iface.get_base(pinned));
    pinned->iface.free_buffer(pinned);
    delete pinned;
    return 0;
}
