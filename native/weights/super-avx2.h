// super.h with AVX2: a block is four quarters, and a pair of products must fit in 16 bits.
#pragma once

// A quarter of a block in registers: 32 bytes of low nibbles and 32 of high ones, and the scales of pairs of them as 16
// bits.
struct lctx_super_quarter {
    __m256i low, high, low_scales, high_scales;
};

// Says which bytes of eight scales, the same in both halves of the lanes, are those of group g: of all lanes, and with
// g + 1 in the upper half.
struct lctx_scale_lanes {
    alignas(32) uint8_t same[8][32], next[8][32];
    constexpr lctx_scale_lanes() : same(), next() {
        for (int g = 0; g < 8; g++) {
            for (int i = 0; i < 32; i++) {
                same[g][i] = (uint8_t)(2 * g + i % 2);
                next[g][i] = (uint8_t)(2 * ((g + i / 16) % 8) + i % 2);
            }
        }
    }
};

static inline const lctx_scale_lanes & lctx_lanes_of_scales() {
    static constexpr lctx_scale_lanes LANES;
    const lctx_scale_lanes * lanes = &LANES;
    __asm__("" : "+r"(lanes));  // or GCC makes each row again, in four steps
    return *lanes;
}

static inline __m256i lctx_pick_scales(__m256i eight_each, const uint8_t (&lanes)[32]) {
    return _mm256_shuffle_epi8(eight_each, _mm256_load_si256((const __m256i *)lanes));
}

// Bits [FIRST, FIRST + N) of 32 bytes as bits 4 and on.
template <int FIRST, int N> static inline __m256i lctx_upper_bits(__m256i packed) {
    const __m256i mask = _mm256_set1_epi8((char)(((1 << N) - 1) << 4));
    if constexpr (FIRST < 4) {
        return _mm256_and_si256(_mm256_slli_epi16(packed, 4 - FIRST), mask);
    } else {
        return _mm256_and_si256(_mm256_srli_epi16(packed, FIRST - 4), mask);
    }
}

static inline void lctx_super_nibbles(const uint8_t * packed, lctx_super_quarter & to) {
    const __m256i both = _mm256_loadu_si256((const __m256i *)packed), nibble = _mm256_set1_epi8(15);
    to.low = _mm256_and_si256(both, nibble);
    to.high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
}

// Of Q4_K and Q5_K: groups of 32, two of them in a quarter.
template <class BLOCK> struct lctx_super_32 {
    static constexpr int GROUP = 32, ZERO = 0;
    static int at(int g) { return g * 32; }

    explicit lctx_super_32(const BLOCK & b) : b(b) {
        const lctx_four_scales first = lctx_unpack_scales(b.scales, 0), second = lctx_unpack_scales(b.scales, 1);
        const __m128i both = _mm_setr_epi32((int)first.scales, (int)second.scales, (int)first.mins, (int)second.mins);
        const __m128i eight = _mm_cvtepu8_epi16(both);
        all = _mm256_set_m128i(eight, eight);
        mins = _mm256_zextsi128_si256(_mm_cvtepu8_epi16(_mm_srli_si128(both, 8)));
    }
    // Of Q5_K without the fifth bits.
    template <int Q> lctx_super_quarter load() const {
        lctx_super_quarter to;
        lctx_super_nibbles(b.qs + 32 * Q, to);
        to.low_scales = lctx_pick_scales(all, lanes.same[2 * Q]);
        to.high_scales = lctx_pick_scales(all, lanes.same[2 * Q + 1]);
        return to;
    }
    __m256i constants() const { return mins; }
    float offset() const { return -lctx_from_half(b.dmin); }

    const BLOCK & b;

  private:
    const lctx_scale_lanes & lanes = lctx_lanes_of_scales();
    __m256i all, mins;
};

template <> struct lctx_super<block_q4_K> : lctx_super_32<block_q4_K> {
    using lctx_super_32::lctx_super_32;
};

template <> struct lctx_super<block_q5_K> : lctx_super_32<block_q5_K> {
    using lctx_super_32::lctx_super_32;
    template <int Q> lctx_super_quarter load() const {
        const __m256i fifth = _mm256_loadu_si256((const __m256i *)b.qh);
        lctx_super_quarter to = lctx_super_32::load<Q>();
        to.low = _mm256_or_si256(to.low, lctx_upper_bits<2 * Q, 1>(fifth));
        to.high = _mm256_or_si256(to.high, lctx_upper_bits<2 * Q + 1, 1>(fifth));
        return to;
    }
};

// Groups of 16. The bytes of a quarter are 64 apart in the values of a block, and have the zero point 32.
template <> struct lctx_super<block_q6_K> {
    static constexpr int GROUP = 16, ZERO = 32;
    static int at(int g) { return g / 8 * 128 + g % 4 / 2 * 64 + g % 8 / 4 * 32 + g % 2 * 16; }

    explicit lctx_super(const block_q6_K & b)
        : b(b), scales(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)b.scales))) {}
    template <int Q> lctx_super_quarter load() const {
        constexpr int FIRST = Q % 2 * 2;  // of the groups of half a block
        const __m256i eight = _mm256_permute2x128_si256(scales, scales, Q < 2 ? 0x00 : 0x11);
        const __m256i upper = _mm256_loadu_si256((const __m256i *)(b.qh + Q / 2 * 32));
        lctx_super_quarter to;
        lctx_super_nibbles(b.ql + 32 * Q, to);
        to.low = _mm256_or_si256(to.low, lctx_upper_bits<FIRST, 2>(upper));
        to.high = _mm256_or_si256(to.high, lctx_upper_bits<FIRST + 4, 2>(upper));
        to.low_scales = lctx_pick_scales(eight, lanes.next[FIRST]);
        to.high_scales = lctx_pick_scales(eight, lanes.next[FIRST + 4]);
        return to;
    }
    __m256i constants() const { return scales; }

    const block_q6_K & b;

  private:
    const lctx_scale_lanes & lanes = lctx_lanes_of_scales();
    __m256i scales;
};

// Add quarter Q of a block to the sums of NC columns.
template <int Q, int NC, class W>
static inline __attribute__((always_inline)) void lctx_add_quarter(const W & block, const lctx_super_column * x,
                                                                   int64_t i, __m256i * sums) {
    const lctx_super_quarter quarter = block.template load<Q>();
#pragma GCC unroll 4
    for (int c = 0; c < NC; c++) {
        const __m256i * bytes = (const __m256i *)(x[c].bytes + i * QK_K + 64 * Q);
        const __m256i low = _mm256_madd_epi16(_mm256_maddubs_epi16(quarter.low, bytes[0]), quarter.low_scales);
        const __m256i high = _mm256_madd_epi16(_mm256_maddubs_epi16(quarter.high, bytes[1]), quarter.high_scales);
        sums[c] = _mm256_add_epi32(sums[c], _mm256_add_epi32(low, high));
    }
}

static inline float lctx_sum_of(__m256 v) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// A row of n_block blocks with NC columns. EXACT: a block has one product of floats for its sum and one for that of its
// constants, as in a panel (bytes.h); else each lane has.
template <class BLOCK, int NC, bool EXACT> static void lctx_multiply_super(const BLOCK * row, int64_t n_block,
                                                                           const lctx_super_column * x, float * out,
                                                                           int64_t out_row) {
    typedef lctx_super<BLOCK> W;
    __m256 products[NC] = {}, offsets[NC] = {};
    __m128 exact[NC] = {};
    for (int64_t i = 0; i < n_block; i++) {
        lctx_read_ahead(row + i, sizeof(BLOCK));
        const W block(row[i]);
        __m256i sums[NC] = {};
        lctx_add_quarter<0, NC>(block, x, i, sums);
        lctx_add_quarter<1, NC>(block, x, i, sums);
        lctx_add_quarter<2, NC>(block, x, i, sums);
        lctx_add_quarter<3, NC>(block, x, i, sums);
        const float d = lctx_from_half(row[i].d), offset = lctx_offset_of(block);
#pragma GCC unroll 4
        for (int c = 0; c < NC; c++) {
            const __m256i constants =
                _mm256_madd_epi16(block.constants(), _mm256_load_si256((const __m256i *)(x[c].sums + i * 16)));
            if constexpr (W::ZERO > 0) {  // exact, before anything is rounded
                sums[c] = _mm256_sub_epi32(sums[c], _mm256_mullo_epi32(constants, _mm256_set1_epi32(W::ZERO)));
            }
            if constexpr (EXACT) {
                exact[c] +=
                    lctx_two_sums(sums[c], constants) * (_mm_setr_ps(d, offset, 0, 0) * _mm_set1_ps(x[c].scales[i]));
                continue;
            }
            if constexpr (W::ZERO == 0) {
                offsets[c] += _mm256_cvtepi32_ps(constants) * _mm256_set1_ps(offset * x[c].scales[i]);
            }
            products[c] += _mm256_cvtepi32_ps(sums[c]) * _mm256_set1_ps(d * x[c].scales[i]);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < NC; c++) {
        out[c * out_row] = EXACT ? exact[c][0] + exact[c][1] : lctx_sum_of(products[c]) + lctx_sum_of(offsets[c]);
    }
}
