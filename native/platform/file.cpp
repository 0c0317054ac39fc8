#include "file.h"

#include "../base/refusal.h"
#include "system.h"

#include <algorithm>
#include <cstring>

#ifdef _WIN32

#define NOMINMAX
#include <windows.h>
#include <winioctl.h>

#include <filesystem>

namespace {

OVERLAPPED at_offset(uint64_t at) {
    OVERLAPPED o = {};
    o.Offset = (DWORD)at;
    o.OffsetHigh = (DWORD)(at >> 32);
    return o;
}

DWORD piece(size_t n) {
    return (DWORD)std::min(n, (size_t)1 << 30);
}

// 0 with an empty reason at the end of the file.
size_t read_some(HANDLE file, uint64_t from, void * to, size_t n, std::string & why) {
    OVERLAPPED o = at_offset(from);
    DWORD got = 0;
    if (!ReadFile(file, to, piece(n), &got, &o) && GetLastError() != ERROR_HANDLE_EOF) {
        why = lctx_system_error();
        return 0;
    }
    return got;
}

size_t write_some(HANDLE file, uint64_t from, const void * data, size_t n, std::string & why) {
    OVERLAPPED o = at_offset(from);
    DWORD put = 0;
    if (!WriteFile(file, data, piece(n), &put, &o) || put == 0) {
        why = lctx_system_error();
        return 0;
    }
    return put;
}

}  // namespace

lctx_unnamed_file::lctx_unnamed_file(const std::string & folder) {
    const std::wstring wide = std::filesystem::u8path(folder).wstring();
    wchar_t name[MAX_PATH];
    if (GetTempFileNameW(wide.c_str(), L"kv", 0, name) == 0) {
        throw lctx_refusal(lctx_system_error());
    }
    // it has a name as long as it is open, which nobody else can open, and the system removes it with the last handle
    file_ = CreateFileW(name, GENERIC_READ | GENERIC_WRITE, 0, nullptr, CREATE_ALWAYS,
                        FILE_ATTRIBUTE_TEMPORARY | FILE_FLAG_DELETE_ON_CLOSE | FILE_FLAG_RANDOM_ACCESS, nullptr);
    if (file_ == INVALID_HANDLE_VALUE) {
        const std::string why = lctx_system_error();
        DeleteFileW(name);
        throw lctx_refusal(why);
    }
    DWORD n = 0;
    DeviceIoControl(file_, FSCTL_SET_SPARSE, nullptr, 0, nullptr, 0, &n, nullptr);  // NTFS and ReFS can
}

lctx_unnamed_file::~lctx_unnamed_file() {
    CloseHandle(file_);
}

uint64_t lctx_unnamed_file::free_bytes() const {
    wchar_t path[4096];
    const DWORD n = GetFinalPathNameByHandleW(file_, path, 4096, 0);
    ULARGE_INTEGER there = {};
    const bool known = n > 0 && n < 4096 &&
                       GetDiskFreeSpaceExW(std::filesystem::path(path).parent_path().c_str(), &there, nullptr, nullptr);
    return known ? there.QuadPart : 0;
}

uint64_t lctx_unnamed_file::size() const {
    LARGE_INTEGER n = {};
    return GetFileSizeEx(file_, &n) ? (uint64_t)n.QuadPart : 0;
}

bool lctx_unnamed_file::resize(uint64_t size, std::string & why) {
    FILE_END_OF_FILE_INFO end = {};
    end.EndOfFile.QuadPart = (LONGLONG)size;
    if (!SetFileInformationByHandle(file_, FileEndOfFileInfo, &end, sizeof(end))) {
        why = lctx_system_error();
        return false;
    }
    return true;
}

// Room in a sparse file is not reserved.
bool lctx_unnamed_file::reserve(uint64_t, uint64_t, std::string &) {
    return true;
}

void lctx_unnamed_file::give_back(uint64_t from, uint64_t n) {
    FILE_ZERO_DATA_INFORMATION range = {};
    range.FileOffset.QuadPart = (LONGLONG)from;
    range.BeyondFinalZero.QuadPart = (LONGLONG)(from + n);
    DWORD got = 0;
    DeviceIoControl(file_, FSCTL_SET_ZERO_DATA, &range, sizeof(range), nullptr, 0, &got, nullptr);
}

bool lctx_unnamed_file::read_parts(uint64_t from, const lctx_row_target * parts, int n, bool wait,
                                   std::string & why) const {
    bool ok = wait;
    for (int i = 0; ok && i < n; i++) {
        ok = read(from, parts[i].to, parts[i].size, why);
        from += parts[i].size;
    }
    return ok;
}

#else

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

namespace {

// A file that has no name from the beginning, or loses it at once.
int open_unnamed(const std::string & folder) {
#ifdef O_TMPFILE
    const int unnamed = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (unnamed >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) {
        return unnamed;
    }
#endif
    std::string name = folder + "/pylongctx-kv-XXXXXX";
    const int named = mkstemp(name.data());
    if (named >= 0) {
        fcntl(named, F_SETFD, FD_CLOEXEC);
        unlink(name.c_str());
    }
    return named;
}

// Network file systems give a file that is open another name instead of removing it.
bool has_name(int file) {
    struct stat s = {};
    return fstat(file, &s) != 0 || s.st_nlink != 0;
}

size_t read_some(int file, uint64_t from, void * to, size_t n, std::string & why) {
    ssize_t got = -1;
    do {
        got = pread(file, to, n, (off_t)from);
    } while (got < 0 && errno == EINTR);
    why = got < 0 ? lctx_system_error() : "";
    return got > 0 ? (size_t)got : 0;
}

size_t write_some(int file, uint64_t from, const void * data, size_t n, std::string & why) {
    ssize_t put = -1;
    do {
        put = pwrite(file, data, n, (off_t)from);
    } while (put == 0 || (put < 0 && errno == EINTR));
    why = put < 0 ? lctx_system_error() : "";
    return put > 0 ? (size_t)put : 0;
}

}  // namespace

lctx_unnamed_file::lctx_unnamed_file(const std::string & folder) : file_(open_unnamed(folder)) {
    if (file_ < 0) {
        throw lctx_refusal(lctx_system_error());
    }
    if (has_name(file_)) {
        close(file_);
        throw lctx_refusal("its file system keeps files that were removed while they are open");
    }
}

lctx_unnamed_file::~lctx_unnamed_file() {
    close(file_);
}

uint64_t lctx_unnamed_file::free_bytes() const {
    struct statvfs s = {};
    return fstatvfs(file_, &s) == 0 ? (uint64_t)s.f_bavail * s.f_frsize : 0;
}

uint64_t lctx_unnamed_file::size() const {
    struct stat s = {};
    return fstat(file_, &s) == 0 ? (uint64_t)s.st_size : 0;
}

bool lctx_unnamed_file::resize(uint64_t size, std::string & why) {
    const bool ok = ftruncate(file_, (off_t)size) == 0;
    why = ok ? "" : lctx_system_error();
    return ok;
}

#ifdef __linux__

bool lctx_unnamed_file::reserve(uint64_t from, uint64_t n, std::string & why) {
    int rc = 0;
    do {
        rc = fallocate(file_, 0, (off_t)from, (off_t)n);
    } while (rc != 0 && errno == EINTR);
    const bool ok = rc == 0 || errno == EOPNOTSUPP;
    why = ok ? "" : lctx_system_error();
    return ok;
}

void lctx_unnamed_file::give_back(uint64_t from, uint64_t n) {
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from, (off_t)n);
}

#else

// macOS reserves room behind the end of a file only (F_PREALLOCATE), and the size is set before.
bool lctx_unnamed_file::reserve(uint64_t, uint64_t, std::string &) {
    return true;
}

void lctx_unnamed_file::give_back(uint64_t from, uint64_t n) {
#ifdef F_PUNCHHOLE
    fpunchhole_t hole = {};
    hole.fp_offset = (off_t)from;
    hole.fp_length = (off_t)n;
    fcntl(file_, F_PUNCHHOLE, &hole);
#endif
}

#endif

bool lctx_unnamed_file::read_parts(uint64_t from, const lctx_row_target * parts, int n, bool wait,
                                   std::string & why) const {
    iovec to[lctx_row_file::MOST_TARGETS];
    size_t size = 0;
    for (int i = 0; i < n; i++) {
        to[i] = {parts[i].to, parts[i].size};
        size += parts[i].size;
    }
#ifdef RWF_NOWAIT
    const ssize_t got = preadv2(file_, to, n, (off_t)from, wait ? 0 : RWF_NOWAIT);
#else
    const ssize_t got = wait ? preadv(file_, to, n, (off_t)from) : -1;
#endif
    if (got == (ssize_t)size) {
        return true;
    }
    if (wait) {
        why = got < 0 ? lctx_system_error() : "";
        return false;
    }
#ifdef __APPLE__
    radvisory wanted = {(off_t)from, (int)size};
    fcntl(file_, F_RDADVISE, &wanted);
#else
    posix_fadvise(file_, (off_t)from, (off_t)size, POSIX_FADV_WILLNEED);
#endif
    return false;
}

#endif

bool lctx_unnamed_file::read(uint64_t from, void * to, size_t n, std::string & why) const {
    for (size_t done = 0; done < n;) {
        const size_t got = read_some(file_, from + done, (char *)to + done, n - done, why);
        if (got == 0) {
            memset((char *)to + done, 0, n - done);
            return false;
        }
        done += got;
    }
    return true;
}

bool lctx_unnamed_file::write(uint64_t from, const void * data, size_t n, std::string & why) {
    for (size_t done = 0; done < n;) {
        const size_t put = write_some(file_, from + done, (const char *)data + done, n - done, why);
        if (put == 0) {
            return false;
        }
        done += put;
    }
    return true;
}
