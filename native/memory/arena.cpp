#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>
#include <cstdint>

lctx_arena::~lctx_arena() {
    if (data_) {
        munmap(data_, size_);
    }
}

size_t lctx_arena::grain() {
    static const auto size = (size_t)sysconf(_SC_PAGESIZE);
    return size;
}

bool lctx_arena::reserve(size_t size) {
    void * data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        return false;
    }
#ifdef MADV_NOHUGEPAGE
    madvise(data, size, MADV_NOHUGEPAGE);  // a huge page would stay while any part of it is in use
#endif
    data_ = (char *)data;
    size_ = size;
    return true;
}

void lctx_arena::give_back(char * from, char * end) {
    const uintptr_t mask = grain() - 1, first = ((uintptr_t)from + mask) & ~mask, last = (uintptr_t)end & ~mask;
    if (first < last) {
        madvise((void *)first, last - first, MADV_DONTNEED);
    }
}
