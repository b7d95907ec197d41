/* Reductions of n tensors, from left to right, in tiles that stay in the innermost cache.

   16-bit floats are summed in float32 and rounded once, to nearest, ties to even. A mean is the sum divided by n. A
   maximum or minimum with a NaN is a NaN. Truth values: a sum is "or", a product "and". */

#include "core.h"

#include <string.h>

#define TILE 2048

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) && !defined(SHOAL_ONE_TARGET)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

uint64_t dtype_bytes(enum dtype dtype) {
    static const uint8_t bytes[] = {[F32] = 4, [F64] = 8, [BF16] = 2, [F16] = 2, [I8] = 1, [U8] = 1,
                                    [I16] = 2, [I32] = 4, [I64] = 8, [BOOL] = 1, [BYTES] = 1};
    return bytes[dtype];
}

#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * 1u * (b)) /* 1u: short integers would be multiplied as int, which may overflow */
#define GREATER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define LESS(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

#define LOOP(name, T, OP)                                                                                              \
    CLONES static void name(void *acc, const void *left, const void *right, uint64_t n) {                              \
        T *out = acc;                                                                                                  \
        const T *a = left, *b = right;                                                                                 \
        for (uint64_t i = 0; i < n; i++) out[i] = (T)OP(a[i], b[i]);                                                   \
    }
#define LOOPS(T, U)                                                                                                    \
    LOOP(sum_##T, U, PLUS) LOOP(prod_##T, U, TIMES) LOOP(max_##T, T, GREATER) LOOP(min_##T, T, LESS)

LOOPS(float, float)
LOOPS(double, double)
LOOPS(int8_t, uint8_t) /* sums and products wrap: unsigned arithmetic, the same bits */
LOOPS(uint8_t, uint8_t)
LOOPS(int16_t, uint16_t)
LOOPS(int32_t, uint32_t)
LOOPS(int64_t, uint64_t)

typedef void loop(void *, const void *, const void *, uint64_t);
#define ROW(T) {[SUM] = sum_##T, [AVG] = sum_##T, [MAX] = max_##T, [MIN] = min_##T, [PROD] = prod_##T}

static loop *const LOOP_OF[][PROD + 1] = {
    [F32] = ROW(float),   [F64] = ROW(double), [BF16] = ROW(float),   [F16] = ROW(float),   [I8] = ROW(int8_t),
    [U8] = ROW(uint8_t),  [I16] = ROW(int16_t), [I32] = ROW(int32_t), [I64] = ROW(int64_t),
    [BOOL] = {[SUM] = max_uint8_t, [AVG] = max_uint8_t, [MAX] = max_uint8_t, [MIN] = min_uint8_t, [PROD] = min_uint8_t},
};

static inline float as_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint32_t as_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

CLONES static void from_bf16(float *restrict out, const uint16_t *restrict in, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) out[i] = as_float((uint32_t)in[i] << 16);
}

CLONES static void to_bf16(uint16_t *restrict out, const float *restrict in, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits = as_bits(in[i]);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

/* The exponent is moved by a product with 2^112, which also makes subnormal numbers normal. */
CLONES static void from_f16(float *restrict out, const uint16_t *restrict in, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        uint32_t h = in[i], size = (h & 0x7fff) << 13;
        uint32_t bits = as_bits(as_float(size) * 0x1p112f);
        bits |= (h & 0x7c00) == 0x7c00 ? 0x7f800000 | size : 0;
        out[i] = as_float(bits | (h & 0x8000) << 16);
    }
}

/* Subnormal results are rounded by adding 0.5, whose last bit is worth as much as theirs. */
CLONES static void to_f16(uint16_t *restrict out, const float *restrict in, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits = as_bits(in[i]), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
        uint32_t small = as_bits(as_float(size) + 0.5f) - 0x3f000000;
        uint32_t normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
        uint32_t special = size > 0x7f800000 ? 0x7e00 : 0x7c00;
        uint32_t half = size < 0x38800000 ? small : size >= 0x47800000 ? special : normal;
        out[i] = (uint16_t)(half | sign);
    }
}

CLONES static void divide_float(float *x, uint64_t n, float by) {
    for (uint64_t i = 0; i < n; i++) x[i] /= by;
}

CLONES static void divide_double(double *x, uint64_t n, double by) {
    for (uint64_t i = 0; i < n; i++) x[i] /= by;
}

/* `in` as the loops want it: where it lies, or widened to float32 in `scratch`. */
static const void *widened(enum dtype dtype, const char *in, float *scratch, uint64_t n) {
    if (dtype == BF16) return from_bf16(scratch, (const uint16_t *)in, n), scratch;
    if (dtype == F16) return from_f16(scratch, (const uint16_t *)in, n), scratch;
    return in;
}

void combine(enum dtype dtype, enum reduction reduction, const char *const *in, int n, uint64_t count, char *const *out,
             int outs) {
    _Alignas(LINE) double total[TILE];
    _Alignas(LINE) float left[TILE], right[TILE];
    uint64_t bytes = dtype_bytes(dtype);
    loop *apply = LOOP_OF[dtype][reduction];
    for (uint64_t at = 0; at < count; at += TILE) {
        uint64_t m = count - at < TILE ? count - at : TILE, offset = at * bytes;
        const void *a = widened(dtype, in[0] + offset, left, m);
        if (n == 1) memcpy(total, a, m * (bytes < 4 && a == left ? 4 : bytes));
        for (int i = 1; i < n; i++) {
            apply(total, a, widened(dtype, in[i] + offset, right, m), m);
            a = total;
        }
        if (reduction == AVG && dtype == F64) divide_double(total, m, n);
        if (reduction == AVG && dtype != F64) divide_float((float *)total, m, (float)n);
        if (dtype == BF16) to_bf16((uint16_t *)left, (float *)total, m);
        if (dtype == F16) to_f16((uint16_t *)left, (float *)total, m);
        const void *result = dtype == BF16 || dtype == F16 ? (void *)left : (void *)total;
        for (int o = 0; o < outs; o++)
            if (out[o] != NULL) memcpy(out[o] + offset, result, m * bytes);
    }
}
