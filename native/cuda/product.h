// Scores in f32, where f16 is not exact enough to choose by: products of 64 rows with 64 rows, in slabs of 32 elements.
#pragma once

#include "rows.h"

struct lctx_product {
    static constexpr int TILE = 64, SLAB = 32, THREADS = 256;
    static constexpr int STEP = SLAB + 4;  // from row to row: 8 rows read 16 bytes each from different banks
    static constexpr int N_FLOAT = 2 * TILE * STEP;

    float * slabs;  // [2][TILE][STEP], 16-byte aligned

    // A thread has the products of rows a(0 .. 3) and b(0 .. 3).
    __device__ int a(int i) const { return (int)threadIdx.x / 16 * 4 + i; }
    __device__ int b(int i) const { return (int)threadIdx.x % 16 + 16 * i; }

    // c += rows a times rows b. load_a(row, d, x) and load_b give elements [d, d + 8); dim is a multiple of 8. All threads come here;
    // those that do not want their products say so.
    template <typename A, typename B>
    __device__ void add(int dim, A && load_a, B && load_b, float (&c)[4][4], bool is_wanted = true) const {
        const int row = (int)threadIdx.x / 4, octet = (int)threadIdx.x % 4 * 8;
        for (int d = 0; d < dim; d += SLAB) {
            float x[8] = {}, y[8] = {};
            if (d + octet < dim) {
                load_a(row, d + octet, x);
                load_b(row, d + octet, y);
            }
            __syncthreads();
            lctx_store_8(slabs + row * STEP + octet, x);
            lctx_store_8(slabs + (TILE + row) * STEP + octet, y);
            __syncthreads();
            if (is_wanted) {
                add_slab(c);
            }
        }
    }

  private:
    __device__ void add_slab(float (&c)[4][4]) const {
        for (int d = 0; d < SLAB; d += 4) {
            float4 p[4], q[4];
            for (int i = 0; i < 4; i++) {
                p[i] = *(const float4 *)(slabs + a(i) * STEP + d);
                q[i] = *(const float4 *)(slabs + (TILE + b(i)) * STEP + d);
            }
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 4; j++) {
                    c[i][j] += p[i].x * q[j].x;
                    c[i][j] += p[i].y * q[j].y;
                    c[i][j] += p[i].z * q[j].z;
                    c[i][j] += p[i].w * q[j].w;
                }
            }
        }
    }
};
