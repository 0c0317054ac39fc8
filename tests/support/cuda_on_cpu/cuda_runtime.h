// The calls of CUDA's runtime that native/cuda/arena.cu makes, on memory of the CPU, and how many copies they were.
#pragma once

#include <cstdlib>
#include <cstring>

using cudaError_t = int;
using cudaStream_t = void *;

constexpr int cudaSuccess = 0, cudaMemcpyDefault = 0, cudaHostAllocPortable = 0;
constexpr cudaStream_t cudaStreamPerThread = nullptr;

inline int n_copies_made = 0;

inline const char * cudaGetErrorString(cudaError_t) {
    return "";
}
inline cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetByPCIBusId(int * device, const char *) {
    return *device = 0, cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void ** data, size_t size, int) {
    return *data = malloc(size), cudaSuccess;
}
inline cudaError_t cudaFreeHost(void * data) {
    return free(data), cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void * to, int value, size_t size, cudaStream_t) {
    return memset(to, value, size), cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t size, int, cudaStream_t) {
    return n_copies_made++, memcpy(to, from, size), cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void * to, size_t pitch_to, const void * from, size_t pitch_from, size_t width, size_t height, int,
                                     cudaStream_t) {
    for (size_t i = 0; i < height; i++) {
        memcpy((char *)to + i * pitch_to, (const char *)from + i * pitch_from, width);
    }
    return n_copies_made++, cudaSuccess;
}
