# What ggml-vulkan is compiled with: what is missing is named here, with the package of Debian and Ubuntu that has it.

set(LCTX_VULKAN_HEADER_VERSION 272)  # VK_EXT_layer_settings, which ggml-vulkan uses; Debian 12 has 239
find_package(Vulkan COMPONENTS glslc)
find_package(SPIRV-Headers CONFIG QUIET)

set(missing "")
if(NOT Vulkan_LIBRARY OR NOT Vulkan_INCLUDE_DIR)
    list(APPEND missing "the Vulkan loader and its headers: libvulkan-dev")
else()
    file(STRINGS "${Vulkan_INCLUDE_DIR}/vulkan/vulkan_core.h" header REGEX "^#define VK_HEADER_VERSION [0-9]+")
    string(REGEX MATCH "[0-9]+" header "${header}")
    if(header LESS LCTX_VULKAN_HEADER_VERSION)
        list(APPEND missing "newer Vulkan headers than 1.3.${header} of ${Vulkan_INCLUDE_DIR}: libvulkan-dev of Debian 13, whose usr/include may be \
named with -DVulkan_INCLUDE_DIR= (make vulkan-check does that)")
    endif()
endif()
if(NOT Vulkan_GLSLC_EXECUTABLE)
    list(APPEND missing "the compiler of shaders: glslc")
endif()
if(NOT SPIRV-Headers_FOUND)
    list(APPEND missing "the headers of SPIR-V: spirv-headers")
endif()
if(missing)
    list(JOIN missing "\n  " missing)
    message(FATAL_ERROR "GGML_VULKAN needs what is not here; install these packages:\n  ${missing}")
endif()
