#include "arena.h"

#include "ggml-backend-impl.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace {

// Says where a buffer lies.
struct memory {
    int device = -1;  // of the CUDA runtime
    char * data = nullptr;
    size_t size = 0;
};

// ---- the buffer: ggml's own would free the range with cudaFree ----

memory & memory_of(ggml_backend_buffer_t buffer) {
    return *(memory *)buffer->context;
}

void check(cudaError_t error) {
    if (error != cudaSuccess) {
        GGML_ABORT("lctx: CUDA error: %s", cudaGetErrorString(error));
    }
}

// One copy or memset, and what came before it on this thread.
template <typename F> void at_once(ggml_backend_buffer_t buffer, F && start) {
    check(cudaSetDevice(memory_of(buffer).device));
    check(start(cudaStreamPerThread));
    check(cudaStreamSynchronize(cudaStreamPerThread));
}

void copy(ggml_backend_buffer_t buffer, void * to, const void * from, size_t size) {
    at_once(buffer, [&](cudaStream_t stream) { return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream); });
}

void fill(ggml_backend_buffer_t buffer, void * to, uint8_t value, size_t size) {
    at_once(buffer, [&](cudaStream_t stream) { return cudaMemsetAsync(to, value, size, stream); });
}

void * get_base(ggml_backend_buffer_t buffer) {
    return memory_of(buffer).data;
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    fill(buffer, (char *)t->data + offset, value, size);
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    copy(buffer, (char *)t->data + offset, data, size);
}

void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    copy(buffer, data, (const char *)t->data + offset, size);
}

// n_copies pieces of `size` bytes, whose beginnings are the strides apart.
void set_tensor_2d(ggml_backend_buffer_t buffer, ggml_tensor * t, const void * data, size_t offset, size_t size,
                   size_t n_copies, size_t stride_tensor, size_t stride_data) {
    at_once(buffer, [&](cudaStream_t stream) {
        return cudaMemcpy2DAsync((char *)t->data + offset, stride_tensor, data, stride_data, size, n_copies,
                                 cudaMemcpyDefault, stream);
    });
}

void get_tensor_2d(ggml_backend_buffer_t buffer, const ggml_tensor * t, void * data, size_t offset, size_t size,
                   size_t n_copies, size_t stride_tensor, size_t stride_data) {
    at_once(buffer, [&](cudaStream_t stream) {
        return cudaMemcpy2DAsync(data, stride_data, (const char *)t->data + offset, stride_tensor, size, n_copies,
                                 cudaMemcpyDefault, stream);
    });
}

// From the same device only; ggml goes through the host for what is refused here.
bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    if (src->buffer->buft != buffer->buft) {
        return false;
    }
    copy(buffer, dst->data, src->data, ggml_nbytes(src));
    return true;
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    fill(buffer, memory_of(buffer).data, value, memory_of(buffer).size);
}

void clear_nothing(ggml_backend_buffer_t, uint8_t) {
    GGML_ABORT("lctx: a range that is committed in parts is cleared tensor by tensor");
}

ggml_backend_buffer_i buffer_interface() {
    ggml_backend_buffer_i i = {};
    i.clear = clear_nothing;
    i.get_base = get_base;
    i.memset_tensor = memset_tensor;
    i.set_tensor = set_tensor;
    i.get_tensor = get_tensor;
    i.set_tensor_2d = set_tensor_2d;
    i.get_tensor_2d = get_tensor_2d;
    i.cpy_tensor = cpy_tensor;
    return i;
}

void free_pinned(ggml_backend_buffer_t buffer) {
    cudaSetDevice(memory_of(buffer).device);
    cudaDeviceSynchronize();  // nothing reads it any more
    cudaFreeHost(memory_of(buffer).data);
    delete &memory_of(buffer);
}

// ---- devices ----

// The number that the CUDA runtime gives to ggml's device, -1 when it is not a CUDA device.
int device_of(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    if (!dev || strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "CUDA") != 0) {
        return -1;
    }
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);
    const std::string id = props.device_id ? props.device_id : "";
    int device = -1;  // ggml marks devices that share a GPU with "-v" and a number
    return cudaDeviceGetByPCIBusId(&device, id.substr(0, id.find('-')).c_str()) == cudaSuccess ? device : -1;
}

CUmemAllocationProp allocation_on(int device) {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    return prop;
}

// 0: no virtual memory.
size_t grain_of(int device) {
    const CUmemAllocationProp prop = allocation_on(device);
    CUdevice handle;
    int is_supported = 0;
    size_t grain = 0;
    const bool ok = cuDeviceGet(&handle, device) == CUDA_SUCCESS &&
                    cuDeviceGetAttribute(&is_supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                                         handle) == CUDA_SUCCESS &&
                    cuMemGetAllocationGranularity(&grain, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS;
    return ok && is_supported ? grain : 0;
}

ggml_backend_buffer_t pinned_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    const int device = device_of(buft);
    void * data = nullptr;
    if (device < 0 || cudaSetDevice(device) != cudaSuccess ||
        cudaHostAlloc(&data, size, cudaHostAllocPortable) != cudaSuccess) {
        cudaGetLastError();  // ggml takes what is left for an error of its own
        return nullptr;
    }
    ggml_backend_buffer_i i = buffer_interface();
    i.free_buffer = free_pinned;
    i.clear = clear;
    return ggml_backend_buffer_init(buft, i, new memory{device, (char *)data, size}, size);
}

size_t grain(ggml_backend_buffer_type_t buft) {
    const int device = device_of(buft);
    return device >= 0 ? grain_of(device) : 0;
}

class arena final : public lctx_device_range {
  public:
    arena(ggml_backend_buffer_type_t buft, int device, size_t grain, char * data, size_t n)
        : buft_(buft), memory_{device, data, n * grain}, grain_(grain), is_committed_(n, false) {}
    ~arena() override;
    arena(const arena &) = delete;
    arena & operator=(const arena &) = delete;

    ggml_backend_buffer_t new_buffer() override {
        return ggml_backend_buffer_init(buft_, buffer_interface(), &memory_, memory_.size);
    }
    bool commit(size_t from, size_t end) override;
    void give_back(size_t from, size_t end) override;
    uint64_t committed() const override {
        return grain_ * std::count(is_committed_.begin(), is_committed_.end(), true);
    }

  private:
    bool map(size_t index);
    void unmap(size_t index);

    ggml_backend_buffer_type_t buft_;
    memory memory_;
    size_t grain_;
    std::vector<bool> is_committed_;  // per grain: each is a mapping of its own, since a part of one cannot be unmapped
};

lctx_device_range * reserve(ggml_backend_buffer_type_t buft, size_t size) {
    const int device = device_of(buft);
    if (size == 0 || device < 0 || cudaSetDevice(device) != cudaSuccess) {
        return nullptr;
    }
    const size_t grain = grain_of(device), n = grain ? (size + grain - 1) / grain : 0;
    CUdeviceptr address = 0;
    if (n == 0 || cuMemAddressReserve(&address, n * grain, 0, 0, 0) != CUDA_SUCCESS) {
        return nullptr;
    }
    return new arena(buft, device, grain, (char *)address, n);
}

arena::~arena() {
    cudaSetDevice(memory_.device);
    cudaDeviceSynchronize();  // nothing reads it any more
    arena::give_back(0, memory_.size);
    cuMemAddressFree((CUdeviceptr)memory_.data, memory_.size);
}

bool arena::map(size_t index) {
    const CUdeviceptr at = (CUdeviceptr)memory_.data + index * grain_;
    const CUmemAllocationProp prop = allocation_on(memory_.device);
    CUmemGenericAllocationHandle handle;
    if (cuMemCreate(&handle, grain_, &prop, 0) != CUDA_SUCCESS) {
        return false;
    }
    const bool is_mapped = cuMemMap(at, grain_, 0, handle, 0) == CUDA_SUCCESS;
    cuMemRelease(handle);  // the mapping holds it
    CUmemAccessDesc access = {};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (is_mapped && cuMemSetAccess(at, grain_, &access, 1) != CUDA_SUCCESS) {
        cuMemUnmap(at, grain_);
        return false;
    }
    return is_mapped;
}

void arena::unmap(size_t index) {
    if (cuMemUnmap((CUdeviceptr)memory_.data + index * grain_, grain_) != CUDA_SUCCESS) {
        GGML_ABORT("lctx: memory of CUDA device %d cannot be given back", memory_.device);
    }
}

bool arena::commit(size_t from, size_t end) {
    std::vector<size_t> mapped;
    for (size_t i = from / grain_; i * grain_ < end; i++) {
        if (is_committed_[i]) {
            continue;
        }
        if (!map(i)) {
            for (size_t index : mapped) {
                unmap(index);
                is_committed_[index] = false;
            }
            return false;
        }
        is_committed_[i] = true;
        mapped.push_back(i);
    }
    return true;
}

void arena::give_back(size_t from, size_t end) {
    for (size_t i = (from + grain_ - 1) / grain_; (i + 1) * grain_ <= end; i++) {
        if (is_committed_[i]) {
            unmap(i);
            is_committed_[i] = false;
        }
    }
}

}  // namespace

const lctx_device_memory_kind lctx_cuda_memory = {pinned_buffer, grain, reserve};
