// What the kernels are told, as push constants: one text for C++ and for GLSL. Addresses first, so that no compiler has to pad, and 128
// bytes at most, which every device has room for. LAST(offset, type, name) makes both check where the last member lies. Strides are in
// bytes, those of pages in elements. What stays the same for a model is a constant of its pipeline (specialization).

#define LCTX_VK_ANGLES(LAST)             \
    uint64_t pos;                        \
    uint64_t freq_factors; /* 0: none */ \
    uint64_t dst;                        \
    int n; /* positions */               \
    int n_pair;                          \
    float freq_scale;                    \
    float ext_factor;                    \
    float corr_low;                      \
    float corr_high;                     \
    float theta_scale;                   \
    LAST(52, float, magnitude)

#define LCTX_VK_STORE(LAST)        \
    uint64_t k;                    \
    uint64_t v;                    \
    uint64_t k_pool;               \
    uint64_t v_pool;               \
    uint64_t pages;                \
    uint64_t rows;                 \
    uint64_t angles;               \
    uint64_t center; /* 0: none */ \
    uint64_t near;                 \
    int k_head_stride;             \
    int k_token_stride;            \
    int v_head_stride;             \
    int v_token_stride;            \
    int k_row;                     \
    int v_row;                     \
    int page_head_stride;          \
    int page_seq_stride;           \
    int near_head_stride;          \
    int near_seq_stride;           \
    LAST(112, int, n_tokens)

#define LCTX_VK_ATTEND(LAST)                                                                                \
    uint64_t q;                                                                                             \
    uint64_t k_pool;                                                                                        \
    uint64_t v_pool;                                                                                        \
    uint64_t pages;                                                                                         \
    uint64_t segs;                                                                                          \
    uint64_t angles;                                                                                        \
    uint64_t near;                                                                                          \
    uint64_t dst; /* rows, then LSE; n_split > 1: parts of rows, each with its largest score and its sum */ \
    int q_head_stride;                                                                                      \
    int q_token_stride;                                                                                     \
    int k_row;                                                                                              \
    int v_row;                                                                                              \
    int page_head_stride;                                                                                   \
    int page_seq_stride;                                                                                    \
    int near_head_stride;                                                                                   \
    int near_seq_stride;                                                                                    \
    int n_tokens;                                                                                           \
    int n_seg;                                                                                              \
    int n_split;                                                                                            \
    int near_mask;                                                                                          \
    int lse;                                                                                                \
    float scale;                                                                                            \
    LAST(120, float, softcap)

#define LCTX_VK_MERGE(LAST)                     \
    uint64_t parts;                             \
    uint64_t dst;                               \
    int n_row;   /* of all tokens and heads */  \
    int n_split; /* 0: rows of dst are there */ \
    LAST(24, int, lse)
