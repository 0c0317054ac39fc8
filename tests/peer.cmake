# Included by CMake after project(llama.cpp) of llama-cpp-python (CMAKE_PROJECT_llama.cpp_INCLUDE in the Makefile).
# The tests ask what it computes, not how fast: its library alone, which asks for little of the compiler.
set(LLAMA_BUILD_COMMON OFF)
string(REPLACE "-O3" "-O1" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")
