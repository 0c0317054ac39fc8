// The C API: devices, and RPC servers.
#include "base/firewall.h"
#include "base/kernel-name.h"
#include "handles.h"
#include "lctx.h"
#include "ops/ops.h"
#include "rpc/rpc.h"

#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

namespace {

bool is_gpu(ggml_backend_dev_t dev) {
    const auto type = ggml_backend_dev_type(dev);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

const char * type_name(ggml_backend_dev_t dev) {
    switch (ggml_backend_dev_type(dev)) {
        case GGML_BACKEND_DEVICE_TYPE_CPU:   return "CPU";
        case GGML_BACKEND_DEVICE_TYPE_GPU:   return "GPU";
        case GGML_BACKEND_DEVICE_TYPE_IGPU:  return "integrated GPU";
        case GGML_BACKEND_DEVICE_TYPE_ACCEL: return "accelerator";
        default:                             return "other";
    }
}

// Return what ggml says of a device, with Vulkan its driver and limits as well; the text stays.
const char * description_of(ggml_backend_dev_t dev) {
#ifdef LCTX_VULKAN
    if (lctx_kernel_name(dev) == "Vulkan") {
        static std::mutex mutex;
        static auto & all = *new std::map<ggml_backend_dev_t, std::string>;
        const std::lock_guard<std::mutex> guard(mutex);
        std::string & text = all[dev];
        text = text.empty() ? lctx_vk_describe(dev) : text;
        return text.c_str();
    }
#endif
    return ggml_backend_dev_description(dev);
}

// Devices of this machine: those that are named, else its GPUs, else the CPU.
std::vector<ggml_backend_dev_t> devices_of(const char * names) {
    std::vector<ggml_backend_dev_t> devices;
    std::istringstream list(names ? names : "");
    for (std::string name; std::getline(list, name, ',');) {
        ggml_backend_dev_t dev = ggml_backend_dev_by_name(name.c_str());
        if (!dev) {
            std::string known;
            for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
                known += (i > 0 ? ", " : "") + std::string(ggml_backend_dev_name(ggml_backend_dev_get(i)));
            }
            throw lctx_refusal("there is no device " + name + ", but " + known);
        }
        devices.push_back(dev);
    }
    for (size_t i = 0; (!names || !*names) && i < ggml_backend_dev_count(); i++) {
        if (is_gpu(ggml_backend_dev_get(i))) {
            devices.push_back(ggml_backend_dev_get(i));
        }
    }
    if (devices.empty()) {
        devices.push_back(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    }
    return devices;
}

// Return whether a device can store one token and attend to it; tensors have no memory.
bool attends(ggml_backend_dev_t dev, ggml_type type, int32_t head_dim) {
    const ggml_context_ptr ctx(ggml_init({16 * ggml_tensor_overhead(), nullptr, true}));
    const auto tensor = [&](ggml_type of, int64_t n0, int64_t n1) { return ggml_new_tensor_2d(ctx.get(), of, n0, n1); };
    lctx_rope rope = {};
    rope.n_dims = head_dim;
    lctx_attend_params params = {};
    params.scale = 1.0f;

    ggml_tensor * token = tensor(GGML_TYPE_F32, head_dim, 1);
    ggml_tensor * pool = tensor(type, head_dim, LCTX_PAGE_ROWS);
    ggml_tensor * table = tensor(GGML_TYPE_I32, 1, 1);
    ggml_tensor * rows = tensor(GGML_TYPE_I32, 4, 1);
    ggml_tensor * angles = lctx_angles(ctx.get(), tensor(GGML_TYPE_I32, 1, 1), nullptr, rope);
    ggml_tensor * stored = lctx_store(ctx.get(), token, token, pool, pool, table, rows, angles, nullptr, nullptr,
                                      nullptr, rope.mode, LCTX_SCORE_LAST, {});
    ggml_tensor * attended = lctx_attend(ctx.get(), token, stored, pool, table, rows, angles, nullptr, nullptr, params);
    const std::initializer_list<ggml_tensor *> nodes = {angles, stored, attended};
    return std::all_of(nodes.begin(), nodes.end(),
                       [&](ggml_tensor * node) { return ggml_backend_dev_supports_op(dev, node); });
}

}  // namespace

std::vector<ggml_backend_dev_t> lctx_model_devices(const std::vector<std::shared_ptr<lctx_rpc_server>> & servers) {
    std::vector<ggml_backend_dev_t> devices;
    for (const auto & server : servers) {
        devices.insert(devices.end(), server->devices.begin(), server->devices.end());
    }
    if (!devices.empty()) {
        const std::vector<ggml_backend_dev_t> local = devices_of(nullptr);
        std::copy_if(local.begin(), local.end(), std::back_inserter(devices), is_gpu);
        devices.push_back(nullptr);
    }
    return devices;
}

int32_t lctx_device_count(void) {
    int32_t n = 0;
    lctx_guard(nullptr, [&] { n = (int32_t)ggml_backend_dev_count(); });
    return n;
}

int32_t lctx_device_get(int32_t i, lctx_device_info * info) {
    if (i < 0 || i >= lctx_device_count()) {
        return LCTX_INVALID;
    }
    ggml_backend_dev_t dev = ggml_backend_dev_get(i);
    const char * description = ggml_backend_dev_description(dev);
    lctx_guard(nullptr, [&] { description = description_of(dev); });
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    *info = {ggml_backend_dev_name(dev), description, type_name(dev), free, total};
    return LCTX_OK;
}

int32_t lctx_device_attends(const char * device, int32_t type, int32_t head_dim) {
    ggml_backend_dev_t dev = ggml_backend_dev_by_name(device);
    if (!dev || !lctx_is_kv_type(type) || head_dim <= 0 || head_dim % 2 != 0 ||
        head_dim % ggml_blck_size((ggml_type)type) != 0) {
        return 0;
    }
    bool yes = false;
    lctx_guard(nullptr, [&] { yes = attends(dev, (ggml_type)type, head_dim); });
    return yes;
}

int32_t lctx_rpc_serve(const char * endpoint, const char * devices, int32_t n_threads, char * err, size_t err_size) {
    std::string error;
    lctx_guard(&error, [&] { lctx_rpc_serve_devices(endpoint, devices_of(devices), n_threads); });
    return lctx_told(error, err, err_size);
}

int32_t lctx_offload_usage(const lctx_context * ctx, lctx_offload_info * info) {
    return lctx_ask(ctx, [&] { *info = ctx->memory->cache().placement().offload(); });
}
