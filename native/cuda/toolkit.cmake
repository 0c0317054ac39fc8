# What ggml-cuda is compiled and linked with. The toolkit may come in parts from PyPI, where cuBLAS is the package nvidia-cublas
# (nvidia-cublas-cu12 for CUDA 12), and a machine that builds may have no driver.

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    # ggml takes those of the GPUs that it finds; without any it would take none
    find_program(NVIDIA_SMI nvidia-smi)
    if(NVIDIA_SMI)
        execute_process(COMMAND "${NVIDIA_SMI}" -L OUTPUT_VARIABLE gpus OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
    if(GGML_NATIVE AND gpus)
        set(CMAKE_CUDA_ARCHITECTURES native)
    else()
        set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 86-real 89-real 90-real 90-virtual)
    endif()
endif()
if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER "${CCACHE}")
endif()
# here too: what links ggml-cuda is linked as CUDA
enable_language(CUDA)

find_package(CUDAToolkit REQUIRED)
if(NOT TARGET CUDA::cublas)
    find_path(LCTX_CUBLAS_INCLUDE cublas_v2.h HINTS "${Python3_SITELIB}/nvidia/cu13/include" "${Python3_SITELIB}/nvidia/cublas/include")
    find_library(LCTX_CUBLAS_LIBRARY NAMES cublas libcublas.so.13 libcublas.so.12 HINTS "${LCTX_CUBLAS_INCLUDE}/../lib")
    if(NOT LCTX_CUBLAS_INCLUDE OR NOT LCTX_CUBLAS_LIBRARY)
        message(FATAL_ERROR "GGML_CUDA needs cuBLAS, which this CUDA toolkit does not have. Install it with the toolkit, or with pip: "
                            "nvidia-cublas, nvidia-cublas-cu12 for CUDA 12; elsewhere than in this Python, name its folders with "
                            "-DLCTX_CUBLAS_INCLUDE= and -DLCTX_CUBLAS_LIBRARY=.")
    endif()
    add_library(CUDA::cublas UNKNOWN IMPORTED)
    set_target_properties(CUDA::cublas PROPERTIES IMPORTED_LOCATION "${LCTX_CUBLAS_LIBRARY}"
                                                  INTERFACE_INCLUDE_DIRECTORIES "${LCTX_CUBLAS_INCLUDE}")
endif()
if(NOT TARGET CUDA::cuda_driver AND NOT GGML_CUDA_NO_VMM)
    # to link with, as the toolkit's own stub: the driver's library is there where it runs
    set(calls cuGetErrorString cuDeviceGet cuDeviceGetAttribute cuMemGetAllocationGranularity cuMemAddressReserve cuMemAddressFree
              cuMemCreate cuMemRelease cuMemMap cuMemUnmap cuMemSetAccess)
    set(stub "")
    foreach(call IN LISTS calls)
        string(APPEND stub "int ${call}(void) { return 0; }\n")
    endforeach()
    file(GENERATE OUTPUT "${CMAKE_BINARY_DIR}/cuda-stub.c" CONTENT "${stub}")
    add_library(lctx-cuda-stub SHARED "${CMAKE_BINARY_DIR}/cuda-stub.c")
    set_target_properties(lctx-cuda-stub PROPERTIES OUTPUT_NAME cuda SOVERSION 1)
    add_library(CUDA::cuda_driver ALIAS lctx-cuda-stub)
endif()
