# GCC 12 takes the stores of a tile configuration for dead, since its _tile_loadconfig does not say that it reads them, and ggml's AMX
# kernels end the process (SIGILL). Without AMX the CPU has the products of multiply.cpp. Clang, which compiles wheels, is right.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    add_compile_options(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()
