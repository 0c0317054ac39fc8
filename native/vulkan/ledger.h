// In test builds: what the dispatches read and wrote since the last barrier. A device may run two dispatches at once
// unless a barrier is between them, but a software device never does, so that no result shows a barrier that is
// missing. Other builds record nothing.
#pragma once

#include <cstdint>
#include <initializer_list>

struct lctx_vk_range {
    uint64_t begin, size;  // addresses of the device
};

#ifdef LCTX_HARNESS

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

class lctx_vk_ledger {
  public:
    // That of a queue, by any pointer that stands for it.
    static lctx_vk_ledger & of(const void * queue) {
        static std::mutex mutex;
        static auto & all = *new std::map<const void *, lctx_vk_ledger>;
        const std::lock_guard<std::mutex> guard(mutex);
        return all[queue];
    }

    // False when a test leaves the barrier before this dispatch out: LCTX_VK_WITHOUT=NAME in the environment.
    bool barrier(const char * name) {
        const char * without = getenv("LCTX_VK_WITHOUT");
        if (without && strcmp(without, name) == 0) {
            return false;
        }
        pending_.clear();
        return true;
    }

    // Throws where a dispatch meets what an earlier one may still be doing.
    void dispatch(const char * name, std::initializer_list<lctx_vk_range> reads,
                  std::initializer_list<lctx_vk_range> writes) {
        for (const lctx_vk_range & r : reads) {
            check(name, r, false);
        }
        for (const lctx_vk_range & r : writes) {
            check(name, r, true);
        }
        for (const lctx_vk_range & r : reads) {
            pending_.push_back({name, r, false});
        }
        for (const lctx_vk_range & r : writes) {
            pending_.push_back({name, r, true});
        }
    }

  private:
    struct use {
        const char * name;
        lctx_vk_range range;
        bool is_written;
    };

    void check(const char * name, const lctx_vk_range & r, bool is_written) {
        for (const use & u : pending_) {
            const bool overlap = r.begin < u.range.begin + u.range.size && u.range.begin < r.begin + r.size;
            if (overlap && (is_written || u.is_written)) {
                pending_.clear();
                throw std::logic_error(std::string("no barrier between ") + u.name + " and " + name +
                                       ", which use the same memory");
            }
        }
    }

    std::vector<use> pending_;
};

#else

struct lctx_vk_ledger {
    static lctx_vk_ledger & of(const void *) {
        static lctx_vk_ledger none;
        return none;
    }
    bool barrier(const char *) { return true; }
    void dispatch(const char *, std::initializer_list<lctx_vk_range>, std::initializer_list<lctx_vk_range>) {}
};

#endif
