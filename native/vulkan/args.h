// Push constants of the kernels, defined once for C++ and GLSL. Addresses come first, so that no compiler has to pad;
// 128 bytes at most, which every device has room for. LAST(offset, type, name) makes both check where the last member
// lies. Strides are in bytes, those of pages in elements. What stays the same for a model is a constant of its pipeline
// (specialization).

#define LCTX_VK_ANGLES(LAST)                                        \
    uint64_t pos, freq_factors, dst; /* freq_factors: 0: none */    \
    int n, n_pair;                   /* n positions */              \
    float freq_scale, ext_factor, corr_low, corr_high, theta_scale; \
    LAST(52, float, magnitude)

#define LCTX_VK_STORE(LAST)                                                                 \
    uint64_t k, v, k_pool, v_pool, pages, rows, angles, center, near; /* center: 0: none */ \
    int k_head_stride, k_token_stride, v_head_stride, v_token_stride, k_row, v_row;         \
    int page_head_stride, page_seq_stride, near_head_stride, near_seq_stride;               \
    LAST(112, int, n_tokens)

#define LCTX_VK_ATTEND(LAST)                                                                                 \
    uint64_t q, k_pool, v_pool, pages, segs, angles, near;                                                   \
    uint64_t dst; /* rows, then LSE; n_split > 1: partial states, each with its largest score and its sum */ \
    int q_head_stride, q_token_stride, k_row, v_row, page_head_stride, page_seq_stride, near_head_stride,    \
        near_seq_stride;                                                                                     \
    int n_tokens, n_tile, n_seg, n_split, near_mask, lse;                                                    \
    float scale;                                                                                             \
    LAST(124, float, softcap)

#define LCTX_VK_MERGE(LAST)                                                                   \
    uint64_t states, dst;                                                                     \
    int n_row, n_split; /* rows of all tokens and heads; n_split: 0: rows of dst are there */ \
    LAST(24, int, lse)

#define LCTX_VK_INDEX(LAST)                                  \
    uint64_t k_pool, index, pages, rows;                     \
    int k_row, index_row, page_head_stride, page_seq_stride; \
    LAST(48, int, n_rows)

#define LCTX_VK_SCORE(LAST)                                                                            \
    uint64_t q, index, pages, rows, segs, angles, tiles;                                               \
    uint64_t scores; /* [n_slab][n_head][n_score]: of chunks, then the reference */                    \
    int q_head_stride, q_token_stride, index_row, page_head_stride, page_seq_stride, n_score, n_tile;  \
    int first, n_slab; /* the tokens outside of tiles, or the tiles, whose scores there is room for */ \
    LAST(100, float, scale)

#define LCTX_VK_CHOOSE(LAST)                                                              \
    uint64_t rows, segs, tiles, scores;                                                   \
    uint64_t dst; /* segments of tokens outside of tiles, or what is written for tiles */ \
    int n_score, n_tile, first;                                                           \
    LAST(52, int, n_slab)
