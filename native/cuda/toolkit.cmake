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
        find_program(LCTX_NVCC NAMES "$ENV{CUDACXX}" nvcc HINTS /usr/local/cuda/bin)
        execute_process(COMMAND "${LCTX_NVCC}" --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
        execute_process(COMMAND "${LCTX_NVCC}" --version OUTPUT_VARIABLE version ERROR_QUIET)
        # with what no other architecture has; all devices of 9.0 run it, and toolkits from 12.0 on know it
        if(version MATCHES "release 11")
            set(hopper 90-real)
        else()
            set(hopper 90a-real)
        endif()
        set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 86-real 89-real ${hopper} 90-virtual)
        # toolkits from 12.8 on know it; drivers translate 90-virtual for it else
        if(known MATCHES sm_120)
            list(APPEND CMAKE_CUDA_ARCHITECTURES 120-real)
        endif()
    endif()
endif()
if(CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER "${CCACHE}")
endif()
# here too: what links ggml-cuda is linked as CUDA
enable_language(CUDA)

if(NOT GGML_CUDA_NO_VMM)
    # instead of the driver's own library, which a machine without a GPU does not have
    add_library(lctx-cuda-driver STATIC "${CMAKE_SOURCE_DIR}/native/cuda/driver.cpp"
                                        "${CMAKE_SOURCE_DIR}/native/platform/system.cpp")
    target_include_directories(lctx-cuda-driver SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    target_link_libraries(lctx-cuda-driver PRIVATE ${CMAKE_DL_LIBS})
    add_library(CUDA::cuda_driver ALIAS lctx-cuda-driver)
endif()
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
