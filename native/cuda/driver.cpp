// The calls of the driver that are made here, looked up in its library where there is one: without a driver ours loads
// all the same, and finds no GPU.
#include "../platform/system.h"

#include <cuda.h>

namespace {

void * find(const char * name) {
#ifdef _WIN32
    static void * const driver = lctx_library_open("nvcuda.dll");
#else
    static void * const driver = lctx_library_open("libcuda.so.1");
#endif
    return driver ? lctx_library_symbol(driver, name) : nullptr;
}

}  // namespace

#define LCTX_FORWARD(name, parameters, arguments)              \
    CUresult CUDAAPI name parameters {                         \
        static const auto call = (decltype(&name))find(#name); \
        return call ? call arguments : CUDA_ERROR_NO_DEVICE;   \
    }

LCTX_FORWARD(cuGetErrorString, (CUresult error, const char ** text), (error, text))
LCTX_FORWARD(cuDeviceGet, (CUdevice * device, int ordinal), (device, ordinal))
LCTX_FORWARD(cuDeviceGetAttribute, (int * value, CUdevice_attribute attribute, CUdevice device),
             (value, attribute, device))
LCTX_FORWARD(cuMemGetAllocationGranularity,
             (size_t * grain, const CUmemAllocationProp * properties, CUmemAllocationGranularity_flags flags),
             (grain, properties, flags))
LCTX_FORWARD(cuMemAddressReserve,
             (CUdeviceptr * at, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags),
             (at, size, alignment, wanted, flags))
LCTX_FORWARD(cuMemAddressFree, (CUdeviceptr at, size_t size), (at, size))
LCTX_FORWARD(cuMemCreate,
             (CUmemGenericAllocationHandle * memory, size_t size, const CUmemAllocationProp * properties,
              unsigned long long flags),
             (memory, size, properties, flags))
LCTX_FORWARD(cuMemRelease, (CUmemGenericAllocationHandle memory), (memory))
LCTX_FORWARD(cuMemMap,
             (CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle memory,
              unsigned long long flags),
             (at, size, offset, memory, flags))
LCTX_FORWARD(cuMemUnmap, (CUdeviceptr at, size_t size), (at, size))
LCTX_FORWARD(cuMemSetAccess, (CUdeviceptr at, size_t size, const CUmemAccessDesc * access, size_t n),
             (at, size, access, n))
