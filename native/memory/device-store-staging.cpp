// Units that lie close while the pools are in a slower memory (ops/staging.h).
#include "device-store.h"

void lctx_device_store::init_staging() {
    if (!staging) {
        return;
    }
    ggml_backend_tensor_memset(staging, 0, 0, ggml_nbytes(staging));
    ggml_backend_tensor_memset(staging_table, 0xff, 0, ggml_nbytes(staging_table));
    for (int32_t head = 0; head < n_head; head++) {
        ggml_backend_tensor_memset(staging, 0xff, head * staging->nb[1] + lctx_staging::HEADER * sizeof(int32_t),
                                   shape_.n_staged * sizeof(int32_t));
    }
}

void lctx_device_store::forget_staged(int32_t seq) {
    if (!staging) {
        return;
    }
    std::vector<int32_t> data(ggml_nelements(staging));
    read(staging, 0, data.data(), ggml_nbytes(staging));
    for (int32_t head = 0; head < n_head; head++) {
        const lctx_staging r = {&data[head * staging->ne[0]], shape_.n_staged};
        for (int32_t frame = 0; frame < r.n_staged; frame++) {
            if (r.keys()[frame] >= 0 && r.keys()[frame] / staging_table->ne[0] == seq) {
                r.keys()[frame] = -1;
            }
        }
    }
    write(staging, 0, data.data(), ggml_nbytes(staging));
    ggml_backend_tensor_memset(staging_table, 0xff, seq * staging_table->nb[2], staging_table->nb[2]);
}

lctx_offload_info lctx_device_store::offload() {
    lctx_offload_info info = {};
    if (!staging) {
        return info;
    }
    std::vector<int32_t> data(ggml_nelements(staging));
    read(staging, 0, data.data(), ggml_nbytes(staging));
    for (int32_t head = 0; head < n_head; head++) {
        const lctx_staging r = {&data[head * staging->ne[0]], shape_.n_staged};
        info.n_hit += (uint32_t)r.n_hit(), info.n_miss += (uint32_t)r.n_miss(), info.n_far += (uint32_t)r.n_far();
    }
    info.device_bytes = bytes();
    info.unit_bytes = shape_.row_bytes() << shape_.unit_shift();
    info.n_staged = shape_.n_staged;
    if (file()) {
        info.file_bytes = file()->committed();
        info.read_bytes = file()->n_read(), info.written_bytes = file()->n_written();
        info.file_seconds = file()->seconds();
    }
    return info;
}
