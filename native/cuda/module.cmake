# The CUDA backend as a separate library, for the package in cuda/ (module.h describes the interface). It contains a hidden copy of
# ggml's base, so that libraries that were compiled elsewhere can load it.

# cuBLAS and the runtime as packages of PyPI next to this one, else those of the toolkit
set(LCTX_CUDA_RPATH "$ORIGIN/../../nvidia/cu13/lib" "$ORIGIN/../../nvidia/cublas/lib" "$ORIGIN/../../nvidia/cuda_runtime/lib"
                    "${CUDAToolkit_LIBRARY_DIR}")

add_library(pylongctx-cuda MODULE EXCLUDE_FROM_ALL native/cuda/module.cpp)
target_compile_definitions(pylongctx-cuda PRIVATE ${LCTX_CUDA_BUILD})
if(NOT GGML_CUDA_NO_VMM)
    target_compile_definitions(pylongctx-cuda PRIVATE LCTX_CUDA_ARENA)
endif()
target_compile_options(pylongctx-cuda PRIVATE ${LCTX_WARNINGS})
target_link_libraries(pylongctx-cuda PRIVATE ggml-cuda ggml-base)
target_link_options(pylongctx-cuda PRIVATE "LINKER:--version-script=${CMAKE_SOURCE_DIR}/native/cuda/module.map" "LINKER:--no-undefined"
                                           "LINKER:--gc-sections")
set_target_properties(pylongctx-cuda PROPERTIES INSTALL_RPATH "${LCTX_CUDA_RPATH}" LINK_DEPENDS "${CMAKE_SOURCE_DIR}/native/cuda/module.map")
install(TARGETS pylongctx-cuda LIBRARY DESTINATION pylongctx_cuda/lib COMPONENT pylongctx-cuda EXCLUDE_FROM_ALL)
install(FILES "${LCTX_UPSTREAM}/LICENSE" DESTINATION pylongctx_cuda/lib RENAME LICENSE.llama.cpp COMPONENT pylongctx-cuda EXCLUDE_FROM_ALL)
