# The CUDA backend as a library of its own, for the package in cuda/ (module.h says how the two meet). ggml's base is in it once more, and
# hidden: libraries that are compiled elsewhere can load it.

# cuBLAS and the runtime beside us, as packages of PyPI; else where the toolkit has them
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
