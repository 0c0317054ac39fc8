# Included by CMake after project(llama.cpp) of llama-cpp-python (CMAKE_PROJECT_llama.cpp_INCLUDE in the Makefile).
# Its library alone, which asks for less of the compiler. -O1 would not do: it multiplies and adds in two steps, so
# that rounded activations differ.
set(LLAMA_BUILD_COMMON OFF)
string(REPLACE "-O3" "-O2" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")
