#include "memory.h"

#include <algorithm>

#ifdef _WIN32

#define NOMINMAX
#include <windows.h>

#include <vector>

size_t lctx_page_size() {
    static const size_t size = [] {
        SYSTEM_INFO info = {};
        GetSystemInfo(&info);
        return (size_t)info.dwPageSize;
    }();
    return size;
}

char * lctx_pages_reserve(size_t size, bool usable) {
    return (char *)VirtualAlloc(nullptr, size, usable ? MEM_RESERVE | MEM_COMMIT : MEM_RESERVE,
                                usable ? PAGE_READWRITE : PAGE_NOACCESS);
}

void lctx_pages_end(char * at, size_t) {
    VirtualFree(at, 0, MEM_RELEASE);
}

bool lctx_pages_use(char * at, size_t size, bool usable) {
    return usable ? VirtualAlloc(at, size, MEM_COMMIT, PAGE_READWRITE) != nullptr
                  : VirtualFree(at, size, MEM_DECOMMIT) != 0;
}

void lctx_pages_discard(char * at, size_t size) {
    VirtualAlloc(at, size, MEM_RESET, PAGE_READWRITE);
    VirtualUnlock(at, size);  // of pages that are not locked it takes the memory at once
}

void lctx_pages_prefer_huge(char *, size_t, bool) {}

size_t lctx_largest_cache() {
    DWORD n = 0;
    GetLogicalProcessorInformation(nullptr, &n);
    std::vector<SYSTEM_LOGICAL_PROCESSOR_INFORMATION> all(n / sizeof(SYSTEM_LOGICAL_PROCESSOR_INFORMATION));
    if (all.empty() || !GetLogicalProcessorInformation(all.data(), &n)) {
        return 0;
    }
    size_t most = 0;
    for (const auto & one : all) {
        most = one.Relationship == RelationCache ? std::max(most, (size_t)one.Cache.Size) : most;
    }
    return most;
}

#else

#include <sys/mman.h>
#include <unistd.h>
#include <cstdint>
#include <fstream>
#include <string>

#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

namespace {

int protection(bool usable) {
    return usable ? PROT_READ | PROT_WRITE : PROT_NONE;
}

}  // namespace

size_t lctx_page_size() {
    static const auto size = (size_t)sysconf(_SC_PAGESIZE);
    return size;
}

char * lctx_pages_reserve(size_t size, bool usable) {
    void * at = mmap(nullptr, size, protection(usable), MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : (char *)at;
}

void lctx_pages_end(char * at, size_t size) {
    munmap(at, size);
}

bool lctx_pages_use(char * at, size_t size, bool usable) {
    return mprotect(at, size, protection(usable)) == 0;
}

void lctx_pages_discard(char * at, size_t size) {
#ifdef __APPLE__
    madvise(at, size, MADV_FREE);  // MADV_DONTNEED keeps the contents there, and so the memory
#else
    madvise(at, size, MADV_DONTNEED);
#endif
}

void lctx_pages_prefer_huge([[maybe_unused]] char * at, [[maybe_unused]] size_t size, [[maybe_unused]] bool huge) {
#ifdef MADV_HUGEPAGE
    madvise(at, size, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
}

#ifdef __APPLE__

size_t lctx_largest_cache() {
    size_t most = 0;
    for (const char * name : {"hw.l2cachesize", "hw.l3cachesize"}) {
        int64_t n = 0;
        size_t size = sizeof(n);
        if (sysctlbyname(name, &n, &size, nullptr, 0) == 0) {
            most = std::max(most, (size_t)n);
        }
    }
    return most;
}

#else

size_t lctx_largest_cache() {
    size_t most = 0;
    for (int i = 0; i < 8; i++) {
        std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/size");
        size_t n = 0;
        char unit = 0;
        if (file >> n >> unit) {
            most = std::max(most, n << (unit == 'M' ? 20 : 10));
        }
    }
    return most;
}

#endif

#endif
