/* Moments in 8 bits, and AdamW with such (shoal.codec.moments and shoal.optim.adamw_8bit, on a CPU the oracle bit by
   bit, of finite numbers): the weights and the gradient are read once and the weights written once, block by block, while a block of both moments lies
   decoded in the innermost cache.

   A map has `decades` decades, `most` = 2^decades - 1 values above 0. Chains of comparisons find a decade: unlike tables,
   every processor has instructions for many of them at once. */

#include "kernels.h"

#include <math.h>

#define MOST_IN_BLOCK 4096
#define DECADES 8

struct map {
    float power[DECADES], border[DECADES], slope[DECADES], top, tiniest;
};

CLONES static float scale_of_block(const float *x, uint64_t n, float tiniest) {
    uint32_t most = as_bits(tiniest);
    for (uint64_t i = 0; i < n; i++) {
        uint32_t size = as_bits(x[i]) & 0x7fffffff;
        most = size > most ? size : most;
    }
    return as_float(most);
}

#define CHAIN(first) _Pragma("GCC unroll 8") for (int k = first; k < decades; k++)
#define INLINE static inline __attribute__((always_inline))

/* `a` if `c` is 1, `b` if it is 0; without a branch, for all compilers. */
INLINE uint32_t pick(int c, uint32_t a, uint32_t b) { return b ^ ((a ^ b) & -(uint32_t)c); }
INLINE float pick_float(int c, float a, float b) { return as_float(pick(c, as_bits(a), as_bits(b))); }

/* Level j of decade k, 2^k <= j < 2^(k+1): 10^(k + 1 - decades) (0.9 (j + 1/2) / 2^k - 0.8); 0 and `most`: 0 and 1. */
INLINE float value_of(float level, const struct map *map, const int decades) {
    float power = 0, part = as_float((as_bits(level + level + 1) & 0x7fffff) | 0x3f800000);
    CHAIN(0) power = pick_float(level >= (float)(1 << k), map->power[k], power);
    return pick_float(level >= (float)((1 << decades) - 1), 1, (part * 0.9f - 0.8f) * power);
}

INLINE uint32_t level_of(float y, const struct map *map, const int decades) {
    float slope = map->slope[0], least = 1, most = (float)((1 << decades) - 1);
    CHAIN(1) {
        int above = y > map->border[k];
        slope = pick_float(above, map->slope[k], slope);
        least = pick_float(above, (float)(1 << k), least);
    }
    float level = y * slope + least * (float)(8.0 / 9.0), last = least + least - 1;
    level = pick_float(level >= least, level, least); /* also of what is no number */
    level = pick_float(level > last, last, level);
    level = pick_float(level > most - 1, most - 1, level);
    level = pick_float(y > map->top, most, level);
    return pick(y > map->border[0], (uint32_t)(int32_t)level, 0);
}

CLONES static void decode_signed(const int8_t *restrict codes, uint64_t n, const struct map *restrict given, float scale,
                                 float *restrict out) {
    struct map map = *given;
    for (uint64_t i = 0; i < n; i++) {
        float code = (float)codes[i], value = value_of(fabsf(code), &map, 7) * scale;
        out[i] = as_float(as_bits(value) | (as_bits(code) & 0x80000000));
    }
}

CLONES static void decode_unsigned(const uint8_t *restrict codes, uint64_t n, const struct map *restrict given,
                                   float scale, float *restrict out) {
    struct map map = *given;
    for (uint64_t i = 0; i < n; i++) out[i] = value_of((float)codes[i], &map, 8) * scale;
}

CLONES static void encode_signed(const float *restrict x, uint64_t n, const struct map *restrict given, float scale,
                                 int8_t *restrict codes) {
    struct map map = *given;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t level = level_of(fabsf(x[i]) / scale, &map, 7), sign = as_bits(x[i]) >> 31;
        codes[i] = (int8_t)((level ^ -sign) + sign);
    }
}

CLONES static void encode_unsigned(const float *restrict x, uint64_t n, const struct map *restrict given, float scale,
                                   uint8_t *restrict codes) {
    struct map map = *given;
    for (uint64_t i = 0; i < n; i++) codes[i] = (uint8_t)level_of(x[i] / scale, &map, 8);
}

/* Scales and codes of `n` numbers, `block` by block; `is_signed` says which of the two maps `map` is. */
EXPORT void shoal_codec_encode_moment(const float *x, uint64_t n, uint64_t block, const struct map *map, int is_signed,
                                      void *codes, float *scales) {
    for (uint64_t at = 0, number = 0; at < n; at += block, number++) {
        uint64_t size = n - at < block ? n - at : block;
        scales[number] = scale_of_block(x + at, size, map->tiniest);
        if (is_signed)
            encode_signed(x + at, size, map, scales[number], (int8_t *)codes + at);
        else
            encode_unsigned(x + at, size, map, scales[number], (uint8_t *)codes + at);
    }
}

/* The inverse: writes `n` numbers to `out`. */
EXPORT void shoal_codec_decode_moment(const void *codes, const float *scales, uint64_t n, uint64_t block,
                                      const struct map *map, int is_signed, float *out) {
    for (uint64_t at = 0, number = 0; at < n; at += block, number++) {
        uint64_t size = n - at < block ? n - at : block;
        if (is_signed)
            decode_signed((const int8_t *)codes + at, size, map, scales[number], out + at);
        else
            decode_unsigned((const uint8_t *)codes + at, size, map, scales[number], out + at);
    }
}

CLONES static void update(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, uint64_t n,
                          const float *restrict with) {
    float beta1 = with[0], rest1 = with[1], beta2 = with[2], rest2 = with[3];
    float root = with[4], eps = with[5], kept = with[6], rate = with[7];
    for (uint64_t i = 0; i < n; i++) {
        float first = m[i] * beta1 + g[i] * rest1, second = v[i] * beta2 + g[i] * g[i] * rest2;
        m[i] = first, v[i] = second;
        p[i] = p[i] * kept - first / (sqrtf(second) / root + eps) * rate;
    }
}

/* One step of `n` numbers. `maps`: the signed one and the other. `with`: beta1, 1 - beta1, beta2, 1 - beta2, the root of
   the second moment's correction, eps, 1 - lr decay, lr over the first moment's correction. */
EXPORT void shoal_codec_adam(float *p, const float *g, uint64_t n, uint64_t block, const struct map *maps,
                             int8_t *first_codes, float *first_scales, uint8_t *second_codes, float *second_scales,
                             const float *with) {
    float m[MOST_IN_BLOCK], v[MOST_IN_BLOCK];
    for (uint64_t at = 0, number = 0; at < n; at += block, number++) {
        uint64_t size = n - at < block ? n - at : block;
        decode_signed(first_codes + at, size, &maps[0], first_scales[number], m);
        decode_unsigned(second_codes + at, size, &maps[1], second_scales[number], v);
        update(p + at, g + at, m, v, size, with);
        first_scales[number] = scale_of_block(m, size, maps[0].tiniest);
        second_scales[number] = scale_of_block(v, size, maps[1].tiniest);
        encode_signed(m, size, &maps[0], first_scales[number], first_codes + at);
        encode_unsigned(v, size, &maps[1], second_scales[number], second_codes + at);
    }
}
