#include "base/log.h"
#include "lctx.h"

void lctx_log_set_level(int32_t level) {
    lctx_log_show(level);
}
