// super.h with AVX-512 VNNI: a block is two halves.
#pragma once

// Half a block in registers. Sums of four products are multiplied with scales as 16 bits: those of low, then of high,
// in each quarter.
struct lctx_super_half {
    __m512i low, high, scales;
};

// `bits` bits of each of 32 bytes, from bit `first` on and from bit `second` on, as bits 4 and on.
static inline __m512i lctx_upper_bits(const uint8_t * packed, int first, int second, int bits) {
    const __m512i both = _mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256((const __m256i *)packed));
    const __m512i counts = _mm512_setr_epi64(first, first, first, first, second, second, second, second);
    const __m512i lowest =
        _mm512_and_si512(_mm512_maskz_srlv_epi64(0xff, both, counts), _mm512_set1_epi8((char)((1 << bits) - 1)));
    return _mm512_maskz_slli_epi16(~0u, lowest, 4);
}

static inline void lctx_super_nibbles(const uint8_t * packed, lctx_super_half & to) {
    const __m512i both = _mm512_loadu_si512(packed), nibble = _mm512_set1_epi8(15);
    to.low = _mm512_and_si512(both, nibble);
    to.high = _mm512_and_si512(_mm512_maskz_srli_epi16(~0u, both, 4), nibble);
}

// Says which of the scales is in a byte of the lanes; 128: none, it is 0.
struct lctx_lanes_32 {
    uint8_t of[2][64];
    constexpr lctx_lanes_32() : of() {
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 64; i++) {
                of[half][i] = (uint8_t)(i % 2 ? 128 : 4 * half + i / 32 * 2 + i % 16 / 8);
            }
        }
    }
};

// Says which of the scales is in a lane.
struct lctx_lanes_16 {
    uint16_t of[2][32];
    constexpr lctx_lanes_16() : of() {
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 32; i++) {
                of[half][i] = (uint16_t)(8 * half + i / 8 + i % 8 / 4 * 4);
            }
        }
    }
};

// Of Q4_K and Q5_K: groups of 32, low nibbles are groups 0 and 2 of a half, high ones 1 and 3.
template <class BLOCK> struct lctx_super_32 {
    static constexpr int GROUP = 32, ZERO = 0;
    static int at(int g) { return (g / 4 * 2 + g % 2) * 64 + g % 4 / 2 * 32; }

    explicit lctx_super_32(const BLOCK & b) : b(b) {
        const lctx_four_scales first = lctx_unpack_scales(b.scales, 0), second = lctx_unpack_scales(b.scales, 1);
        const __m128i both = _mm_setr_epi32((int)first.scales, (int)second.scales, (int)first.mins, (int)second.mins);
        all = _mm512_maskz_broadcast_i32x4(0xffff, both);
        mins = _mm256_zextsi128_si256(_mm_cvtepu8_epi16(_mm_srli_si128(both, 8)));
    }
    // Of Q5_K without the fifth bits.
    lctx_super_half load(int half) const {
        static constexpr lctx_lanes_32 LANES;
        lctx_super_half to;
        lctx_super_nibbles(b.qs + 64 * half, to);
        to.scales = _mm512_maskz_shuffle_epi8(~0ull, all, _mm512_loadu_si512(LANES.of[half]));
        return to;
    }
    __m256i constants() const { return mins; }
    float offset() const { return -lctx_from_half(b.dmin); }

    const BLOCK & b;

  private:
    __m512i all;
    __m256i mins;
};

template <> struct lctx_super<block_q4_K> : lctx_super_32<block_q4_K> {
    using lctx_super_32::lctx_super_32;
};

template <> struct lctx_super<block_q5_K> : lctx_super_32<block_q5_K> {
    using lctx_super_32::lctx_super_32;
    lctx_super_half load(int half) const {
        lctx_super_half to = lctx_super_32::load(half);
        to.low = _mm512_or_si512(to.low, lctx_upper_bits(b.qh, 4 * half, 4 * half + 2, 1));
        to.high = _mm512_or_si512(to.high, lctx_upper_bits(b.qh, 4 * half + 1, 4 * half + 3, 1));
        return to;
    }
};

// Groups of 16 in their order. Bytes have the zero point 32.
template <> struct lctx_super<block_q6_K> {
    static constexpr int GROUP = 16, ZERO = 32;
    static int at(int g) { return g * 16; }

    explicit lctx_super(const block_q6_K & b)
        : b(b), scales(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)b.scales))) {}
    lctx_super_half load(int half) const {
        static constexpr lctx_lanes_16 LANES;
        lctx_super_half to;
        lctx_super_nibbles(b.ql + 64 * half, to);
        to.low = _mm512_or_si512(to.low, lctx_upper_bits(b.qh + 32 * half, 0, 2, 2));
        to.high = _mm512_or_si512(to.high, lctx_upper_bits(b.qh + 32 * half, 4, 6, 2));
        to.scales = _mm512_maskz_permutexvar_epi16(~0u, _mm512_loadu_si512(LANES.of[half]),
                                                   _mm512_maskz_broadcast_i64x4(0xff, scales));
        return to;
    }
    __m256i constants() const { return scales; }

    const block_q6_K & b;

  private:
    __m256i scales;
};

// Both halves of a vector as one; with masks, or GCC 12 warns.
static inline __m256i lctx_add_halves(__m512i v) {
    return _mm256_add_epi32(_mm512_maskz_extracti64x4_epi64(0xff, v, 0), _mm512_maskz_extracti64x4_epi64(0xff, v, 1));
}

// A row of n_block blocks with NC columns. EXACT: a block has one product of floats for its sum and one for that of its
// constants, as in a panel (bytes.h); else each lane has.
template <class BLOCK, int NC, bool EXACT> static void lctx_multiply_super(const BLOCK * row, int64_t n_block,
                                                                           const lctx_super_column * x, float * out,
                                                                           int64_t out_row) {
    typedef lctx_super<BLOCK> W;
    lctx_vf products[NC] = {};
    __m256 offsets[NC] = {};
    __m128 exact[NC] = {};
    for (int64_t i = 0; i < n_block; i++) {
        lctx_read_ahead(row + i, sizeof(BLOCK));
        const W block(row[i]);
        const lctx_super_half first = block.load(0), second = block.load(1);
        const float d = lctx_from_half(row[i].d), offset = lctx_offset_of(block);
#pragma GCC unroll 4
        for (int c = 0; c < NC; c++) {
            const __m512i * bytes = (const __m512i *)(x[c].bytes + i * QK_K);
            const auto product = [](__m512i weights, __m512i column) {
                return (__m512i)lctx_vdot_bytes(lctx_vi{}, (lctx_vi)weights, (lctx_vi)column);
            };
            const __m512i one =
                _mm512_maskz_packs_epi32(~0u, product(first.low, bytes[0]), product(first.high, bytes[1]));
            const __m512i two =
                _mm512_maskz_packs_epi32(~0u, product(second.low, bytes[2]), product(second.high, bytes[3]));
            __m512i sums =
                _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(_mm512_setzero_si512(), one, first.scales), two, second.scales);
            const __m256i constants =
                _mm256_madd_epi16(block.constants(), _mm256_load_si256((const __m256i *)(x[c].sums + i * 16)));
            const float scale = x[c].scales[i];
            if constexpr (W::ZERO > 0) {  // exact, before anything is rounded
                sums = _mm512_sub_epi32(sums, _mm512_maskz_broadcast_i64x4(
                                                  0x0f, _mm256_mullo_epi32(constants, _mm256_set1_epi32(W::ZERO))));
            }
            if constexpr (EXACT) {
                exact[c] += lctx_two_sums(lctx_add_halves(sums), constants) *
                            (_mm_setr_ps(d, offset, 0, 0) * _mm_set1_ps(scale));
                continue;
            }
            if constexpr (W::ZERO == 0) {
                offsets[c] += _mm256_cvtepi32_ps(constants) * _mm256_set1_ps(offset * scale);
            }
            products[c] += __builtin_convertvector((lctx_vi)sums, lctx_vf) * lctx_vset(d * scale);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < NC; c++) {
        if constexpr (EXACT) {
            out[c * out_row] = exact[c][0] + exact[c][1];
        } else {
            const __m256 o = offsets[c];
            out[c * out_row] =
                lctx_vsum(products[c]) + (((o[0] + o[1]) + (o[2] + o[3])) + ((o[4] + o[5]) + (o[6] + o[7])));
        }
    }
}
