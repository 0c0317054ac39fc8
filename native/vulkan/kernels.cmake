# The kernels of native/vulkan become words of SPIR-V, which backend.cpp includes, in ggml's Vulkan backend.

set(LCTX_SPIRV_DIR "${CMAKE_BINARY_DIR}/spirv")
file(MAKE_DIRECTORY "${LCTX_SPIRV_DIR}")
file(GLOB LCTX_SHADERS CONFIGURE_DEPENDS native/vulkan/*.comp)
set(LCTX_SHADERS_H "")
foreach(shader IN LISTS LCTX_SHADERS)
    get_filename_component(name "${shader}" NAME_WE)
    set(spirv "${LCTX_SPIRV_DIR}/lctx-${name}.inc")
    add_custom_command(OUTPUT "${spirv}" DEPENDS "${shader}" DEPFILE "${spirv}.d" VERBATIM
                       COMMAND "${Vulkan_GLSLC_EXECUTABLE}" --target-env=vulkan1.2 -O -Werror -mfmt=c -MD -MF "${spirv}.d" -MT "${spirv}"
                               -o "${spirv}" "${shader}")
    list(APPEND LCTX_SPIRV "${spirv}")
    string(TOUPPER "${name}" upper)
    string(APPEND LCTX_SHADERS_H "constexpr uint32_t ${upper}[] =\n#include \"lctx-${name}.inc\"\n    ;\n")
endforeach()
file(CONFIGURE OUTPUT "${LCTX_SPIRV_DIR}/lctx-shaders.h" CONTENT "${LCTX_SHADERS_H}" @ONLY)
add_custom_target(lctx-spirv DEPENDS ${LCTX_SPIRV})
add_dependencies(ggml-vulkan lctx-spirv)

file(GLOB LCTX_VULKAN_SOURCES CONFIGURE_DEPENDS native/vulkan/*.cpp)
target_sources(ggml-vulkan PRIVATE ${LCTX_VULKAN_SOURCES})
target_include_directories(ggml-vulkan PRIVATE "${CMAKE_SOURCE_DIR}" "${LCTX_SPIRV_DIR}")
target_include_directories(ggml-vulkan SYSTEM PRIVATE "${LCTX_UPSTREAM}/ggml/src" "${LCTX_UPSTREAM}/ggml/src/ggml-vulkan")
set_source_files_properties(${LCTX_VULKAN_SOURCES} TARGET_DIRECTORY ggml-vulkan PROPERTIES COMPILE_OPTIONS "${LCTX_WARNINGS}")
if(LCTX_HARNESS)
    set_source_files_properties(${LCTX_VULKAN_SOURCES} TARGET_DIRECTORY ggml-vulkan PROPERTIES COMPILE_DEFINITIONS LCTX_HARNESS)
endif()
