# Included by CMake after project(llama.cpp) of llama-cpp-python (CMAKE_PROJECT_llama.cpp_INCLUDE in the Makefile).
# The tests ask what it computes, not how fast: its library alone, and of that all but ggml compiled with little effort.
set(LLAMA_BUILD_COMMON OFF)
cmake_language(DEFER CALL target_compile_options llama PRIVATE -O1)
include(${CMAKE_CURRENT_LIST_DIR}/../../native/cpu/amx.cmake)
