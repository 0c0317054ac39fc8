# One library for each kind of x86-64 CPU: the same objects, with ggml-cpu and our kernels compiled for it. lib/kinds.json lists what
# each needs, best first; the package loads the first that the CPU can run (pylongctx/_cpu.py).
#
# Names of features are those of /proc/cpuinfo. libllama.so itself is for all other CPUs, from SSE4.2 on.

set(AVX2 avx avx2 bmi2 f16c fma)
set(AVX512 ${AVX2} avx512f avx512cd avx512vl avx512dq avx512bw)
set(LCTX_KINDS sapphirerapids zen4 cascadelake skylakex alderlake haswell)
set(LCTX_KIND_haswell ${AVX2})
set(LCTX_KIND_alderlake ${AVX2} avx_vnni)
set(LCTX_KIND_skylakex ${AVX512})
set(LCTX_KIND_cascadelake ${AVX512} avx512_vnni)
set(LCTX_KIND_zen4 ${AVX512} avx512_vnni avx512vbmi avx512_bf16)
set(LCTX_KIND_sapphirerapids ${AVX512} avx512_vnni avx512vbmi avx512_bf16 amx_tile amx_int8)

# ggml-cpu once more, as a static library, with the flags of a kind
function(lctx_add_cpu kind)
    get_target_property(folder ggml-cpu SOURCE_DIR)
    get_target_property(sources ggml-cpu SOURCES)
    list(TRANSFORM sources PREPEND "${folder}/" REGEX "^[^/]")
    add_library(ggml-cpu-${kind} STATIC EXCLUDE_FROM_ALL ${sources})
    foreach(property INCLUDE_DIRECTORIES COMPILE_DEFINITIONS COMPILE_FEATURES COMPILE_OPTIONS LINK_LIBRARIES)
        get_target_property(value ggml-cpu ${property})
        if(value)
            set_target_properties(ggml-cpu-${kind} PROPERTIES ${property} "${value}")
        endif()
    endforeach()
    foreach(property COMPILE_DEFINITIONS COMPILE_OPTIONS)
        get_property(value DIRECTORY "${folder}" PROPERTY ${property})
        set_property(TARGET ggml-cpu-${kind} APPEND PROPERTY ${property} ${value})
    endforeach()
    foreach(feature ${LCTX_KIND_${kind}})
        string(REGEX REPLACE "^(avx512|avx)_" "\\1" flag "${feature}")  # -mavx512vnni, -mavxvnni
        string(REPLACE "_" "-" flag "${flag}")  # -mamx-int8
        target_compile_options(ggml-cpu-${kind} PRIVATE -m${flag})
    endforeach()
endfunction()

set_source_files_properties(${LCTX_CPU_SOURCES} PROPERTIES COMPILE_OPTIONS "${LCTX_CPU_OPTIONS}")
set_source_files_properties(native/cpu/threads.cpp PROPERTIES COMPILE_OPTIONS "${LCTX_CPU_OPTIONS};-std=c++20")
set(kinds "")
foreach(kind ${LCTX_KINDS})
    lctx_add_cpu(${kind})
    lctx_add_library(pylongctx-${kind} ggml-cpu-${kind})
    set_target_properties(pylongctx-${kind} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/kinds/${kind}")
    install(TARGETS pylongctx-${kind} LIBRARY DESTINATION pylongctx/lib/${kind} COMPONENT pylongctx)
    add_dependencies(pylongctx pylongctx-${kind})
    list(JOIN LCTX_KIND_${kind} "\", \"" features)
    list(APPEND kinds "\"${kind}\": [\"${features}\"]")
endforeach()
list(JOIN kinds ",\n  " kinds)
file(WRITE "${CMAKE_BINARY_DIR}/kinds.json" "{\n  ${kinds}\n}\n")
install(FILES "${CMAKE_BINARY_DIR}/kinds.json" DESTINATION pylongctx/lib COMPONENT pylongctx)
