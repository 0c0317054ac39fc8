#include "system.h"

#ifdef _WIN32

#include <windows.h>

#include <cstring>

std::string lctx_system_error() {
    const DWORD code = GetLastError();
    char text[512];
    DWORD n = FormatMessageA(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS, nullptr, code, 0, text,
                             sizeof(text), nullptr);
    while (n > 0 && strchr("\r\n. ", text[n - 1])) {
        n--;
    }
    return n > 0 ? std::string(text, n) : "error " + std::to_string(code) + " of Windows";
}

void * lctx_library_open(const char * path) {
    const int n = MultiByteToWideChar(CP_UTF8, 0, path, -1, nullptr, 0);
    std::wstring wide(n > 0 ? n : 1, L'\0');
    MultiByteToWideChar(CP_UTF8, 0, path, -1, wide.data(), n);
    return (void *)LoadLibraryW(wide.c_str());
}

std::string lctx_library_error() {
    return lctx_system_error();
}

void * lctx_library_symbol(void * library, const char * name) {
    return (void *)GetProcAddress((HMODULE)library, name);
}

void lctx_library_close(void * library) {
    FreeLibrary((HMODULE)library);
}

void lctx_at_fork(void (*)(), void (*)(), void (*)()) {}

#else

#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>
#include <cstring>

std::string lctx_system_error() {
    return strerror(errno);
}

void * lctx_library_open(const char * path) {
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

std::string lctx_library_error() {
    return dlerror();
}

void * lctx_library_symbol(void * library, const char * name) {
    return dlsym(library, name);
}

void lctx_library_close(void * library) {
    dlclose(library);
}

void lctx_at_fork(void (*before)(), void (*parent)(), void (*child)()) {
    pthread_atfork(before, parent, child);
}

#endif
