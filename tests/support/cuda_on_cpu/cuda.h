// The calls of CUDA's driver that native/cuda/arena.cu makes, on memory of the CPU: what is not mapped cannot be touched.
#pragma once

#include <sys/mman.h>

#include <cstddef>

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = size_t;

constexpr int CUDA_SUCCESS = 0, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 0, CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0;
constexpr int CU_MEM_ALLOCATION_TYPE_PINNED = 0, CU_MEM_LOCATION_TYPE_DEVICE = 0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 0;
constexpr size_t GRAIN = 1 << 16;

struct CUmemLocation {
    int type, id;
};
struct CUmemAllocationProp {
    int type;
    CUmemLocation location;
};
struct CUmemAccessDesc {
    CUmemLocation location;
    int flags;
};

inline CUresult protect(CUdeviceptr at, size_t size, int protection) {
    return mprotect((void *)at, size, protection);
}
inline CUresult cuDeviceGet(CUdevice * device, int number) {
    return *device = number, CUDA_SUCCESS;
}
inline CUresult cuDeviceGetAttribute(int * value, int, CUdevice) {
    return *value = 1, CUDA_SUCCESS;
}
inline CUresult cuMemGetAllocationGranularity(size_t * grain, const CUmemAllocationProp *, int) {
    return *grain = GRAIN, CUDA_SUCCESS;
}
inline CUresult cuMemAddressReserve(CUdeviceptr * at, size_t size, size_t, CUdeviceptr, unsigned long long) {
    void * data = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *at = (CUdeviceptr)data, data == MAP_FAILED;
}
inline CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
    return munmap((void *)at, size);
}
inline CUresult cuMemCreate(CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp *, unsigned long long) {
    return *handle = size, CUDA_SUCCESS;
}
inline CUresult cuMemRelease(CUmemGenericAllocationHandle) {
    return CUDA_SUCCESS;
}
inline CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    return CUDA_SUCCESS;
}
inline CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *, size_t) {
    return protect(at, size, PROT_READ | PROT_WRITE);
}
inline CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    return madvise((void *)at, size, MADV_DONTNEED) | protect(at, size, PROT_NONE);
}
