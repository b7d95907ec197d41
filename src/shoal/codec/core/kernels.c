/* The hot loops of the codecs, in float32: every function reads its vector once, block by block, while a block lies in
   the innermost cache. The torch forms in the codecs are the oracle, and what runs where this was not built.

   Digits are whole numbers from 0; `per` of them, of base `base`, make a byte, the first the least significant. */

#include "kernels.h"

#include <math.h>

#define TILE 4096

enum scale { LARGEST, NORM, MEAN };
enum rounding { NEAREST, STOCHASTIC, SIGN };

/* Magnitudes compare as their bits do; infinity is above all finite ones, and NaN above infinity. */
CLONES static uint32_t largest_bits(const float *x, uint64_t n) {
    uint32_t most = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t size = as_bits(x[i]) & 0x7fffffff;
        most = size > most ? size : most;
    }
    return most;
}

/* Sixteen sums side by side, so that the order is the same on every processor. */
#define LANES 16
#define SUM(name, TERM)                                                                                                \
    CLONES static double name(const float *x, uint64_t n) {                                                            \
        double part[LANES] = {0}, total = 0;                                                                           \
        uint64_t whole = n - n % LANES;                                                                                \
        for (uint64_t i = 0; i < whole; i += LANES)                                                                    \
            for (int lane = 0; lane < LANES; lane++) part[lane] += TERM((double)x[i + lane]);                          \
        for (uint64_t i = whole; i < n; i++) part[i - whole] += TERM((double)x[i]);                                    \
        for (int lane = 0; lane < LANES; lane++) total += part[lane];                                                  \
        return total;                                                                                                  \
    }
#define SQUARE(v) ((v) * (v))
SUM(sum_of_squares, SQUARE)
SUM(sum_of_sizes, fabs)

static float scale_of(const float *x, uint64_t n, enum scale kind, float divisor) {
    if (kind == LARGEST) return as_float(largest_bits(x, n)) / divisor;
    if (kind == NORM) return (float)(sqrt(sum_of_squares(x, n)) / divisor);
    return (float)(sum_of_sizes(x, n) / (double)n);
}

/* x / scale to the nearest whole number, ties to even, from -levels to levels, plus `offset`. */
CLONES static void quantise_nearest(const float *restrict x, uint64_t n, float scale, float levels, float offset,
                                    uint8_t *restrict out) {
    for (uint64_t i = 0; i < n; i++) {
        float q = rintf(x[i] / scale);
        q = q > levels ? levels : q;
        q = q < -levels ? -levels : q;
        out[i] = (uint8_t)(int32_t)(q + offset);
    }
}

/* floor(x / scale + u); u is number `first` + i of the stream `key` of shoal.maths.counter. */
CLONES static void quantise_at_random(const float *restrict x, uint64_t n, float scale, float levels, float offset,
                                      uint64_t key, uint64_t first, uint8_t *restrict out) {
    for (uint64_t i = 0; i < n; i++) {
        uint64_t z = key + (first + i + 1) * 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        z = z ^ (z >> 31);
        float u = (float)(int32_t)(z >> 41) * 0x1p-23f + 0x1p-24f;
        float q = floorf(x[i] / scale + u);
        q = q > levels ? levels : q;
        q = q < -levels ? -levels : q;
        out[i] = (uint8_t)(int32_t)(q + offset);
    }
}

CLONES static void signs(const float *restrict x, uint64_t n, uint8_t *restrict out) {
    for (uint64_t i = 0; i < n; i++) out[i] = x[i] >= 0;
}

CLONES static void pack_2(const uint8_t *restrict in, uint64_t bytes, uint8_t *restrict out) {
    for (uint64_t b = 0; b < bytes; b++) {
        const uint8_t *d = in + 8 * b;
        out[b] = (uint8_t)(d[0] | d[1] << 1 | d[2] << 2 | d[3] << 3 | d[4] << 4 | d[5] << 5 | d[6] << 6 | d[7] << 7);
    }
}

CLONES static void pack_3(const uint8_t *restrict in, uint64_t bytes, uint8_t *restrict out) {
    for (uint64_t b = 0; b < bytes; b++) {
        const uint8_t *d = in + 5 * b;
        out[b] = (uint8_t)(d[0] + 3 * d[1] + 9 * d[2] + 27 * d[3] + 81 * d[4]);
    }
}

CLONES static void pack_16(const uint8_t *restrict in, uint64_t bytes, uint8_t *restrict out) {
    for (uint64_t b = 0; b < bytes; b++) out[b] = (uint8_t)(in[2 * b] | in[2 * b + 1] << 4);
}

static uint64_t digits_per_byte(int base) { return base == 2 ? 8 : base == 3 ? 5 : base == 16 ? 2 : 1; }

static void pack(const uint8_t *in, uint64_t bytes, int base, uint8_t *out) {
    if (base == 2) pack_2(in, bytes, out);
    else if (base == 3) pack_3(in, bytes, out);
    else if (base == 16) pack_16(in, bytes, out);
    else memcpy(out, in, bytes);
}

/* A scale for every block, and the digits of x / scale + offset. Base 256: a byte each, which is then signed if the
   offset is 0. A block whose scale is 0 is divided by 1; one whose scale is not finite is encoded as zeros. */
EXPORT void shoal_codec_encode(const float *x, uint64_t n, uint64_t block, int scale_kind, float divisor, int rounding,
                               float levels, int offset, int base, uint64_t key, float *scales, uint8_t *out) {
    uint8_t digits[TILE + 8];
    uint64_t have = 0, per = digits_per_byte(base);
    for (uint64_t start = 0; start < n; start += block) {
        uint64_t end = n - start < block ? n : start + block;
        float scale = scale_of(x + start, end - start, (enum scale)scale_kind, divisor);
        *scales++ = scale;
        for (uint64_t at = start; at < end;) {
            uint64_t m = end - at < TILE - have ? end - at : TILE - have;
            float by = scale == 0 ? 1 : scale;
            if (rounding == SIGN) signs(x + at, m, digits + have);
            else if (!isfinite(scale)) memset(digits + have, offset, m);
            else if (rounding == NEAREST) quantise_nearest(x + at, m, by, levels, (float)offset, digits + have);
            else quantise_at_random(x + at, m, by, levels, (float)offset, key, at, digits + have);
            at += m, have += m;
            uint64_t whole = have / per, rest = have % per;
            pack(digits, whole, base, out);
            out += whole;
            memmove(digits, digits + whole * per, rest);
            have = rest;
        }
    }
    if (have) {
        memset(digits + have, 0, per - have);
        pack(digits, 1, base, out);
    }
}

CLONES static void unpack_2(const uint8_t *restrict in, uint64_t bytes, uint8_t *restrict out) {
    for (uint64_t b = 0; b < bytes; b++)
        for (int i = 0; i < 8; i++) out[8 * b + i] = in[b] >> i & 1;
}

CLONES static void unpack_3(const uint8_t *restrict in, uint64_t bytes, uint8_t *restrict out) {
    for (uint64_t b = 0; b < bytes; b++) {
        uint8_t *d = out + 5 * b;
        uint32_t v = in[b];
        d[0] = (uint8_t)(v % 3), d[1] = (uint8_t)(v / 3 % 3), d[2] = (uint8_t)(v / 9 % 3);
        d[3] = (uint8_t)(v / 27 % 3), d[4] = (uint8_t)(v / 81 % 3);
    }
}

CLONES static void unpack_16(const uint8_t *restrict in, uint64_t bytes, uint8_t *restrict out) {
    for (uint64_t b = 0; b < bytes; b++) out[2 * b] = in[b] & 15, out[2 * b + 1] = in[b] >> 4;
}

CLONES static void scale_digits(const uint8_t *restrict in, uint64_t n, float scale, int factor, int offset,
                                float *restrict out) {
    for (uint64_t i = 0; i < n; i++) out[i] = (float)(in[i] * factor - offset) * scale;
}

CLONES static void scale_signed(const int8_t *restrict in, uint64_t n, float scale, float *restrict out) {
    for (uint64_t i = 0; i < n; i++) out[i] = (float)in[i] * scale;
}

/* (factor digit - offset) scale. */
EXPORT void shoal_codec_decode(const float *scales, const uint8_t *in, uint64_t n, uint64_t block, int factor, int offset,
                               int base, float *out) {
    uint8_t digits[TILE]; /* of tiles that are whole bytes: TILE is 8 * 512, and 5 * 819 + 1 */
    uint64_t per = digits_per_byte(base), tile = TILE - TILE % per;
    for (uint64_t at = 0; at < n; at += tile) {
        uint64_t m = n - at < tile ? n - at : tile, bytes = (m + per - 1) / per;
        if (base == 2) unpack_2(in, bytes, digits);
        if (base == 3) unpack_3(in, bytes, digits);
        if (base == 16) unpack_16(in, bytes, digits);
        for (uint64_t i = 0; i < m;) {
            uint64_t number = (at + i) / block, left = (number + 1) * block - at - i, run = left < m - i ? left : m - i;
            if (base == 256) scale_signed((const int8_t *)in + i, run, scales[number], out + at + i);
            else scale_digits(digits + i, run, scales[number], factor, offset, out + at + i);
            i += run;
        }
        in += bytes;
    }
}

/* Floats of few bits with subnormal numbers: `mantissa` bits and exponents biased by `bias`. Rounded to nearest, ties to
   even; a sum with a float whose last bit is worth as much as a subnormal's rounds those. x is at most the largest. */
#define SMALL_FLOAT(name, T, mantissa, bias, sign_shift)                                                               \
    CLONES static void to_##name(const float *restrict x, uint64_t n, float scale, float most, T *restrict out) {      \
        const float magic = as_float((uint32_t)(127 + 23 + 1 - (bias) - (mantissa)) << 23);                            \
        for (uint64_t i = 0; i < n; i++) {                                                                             \
            uint32_t given = as_bits(x[i] / scale), size = given & 0x7fffffff, top = as_bits(most);                    \
            size = size > top ? top : size;                                                                            \
            uint32_t small = as_bits(as_float(size) + magic) - as_bits(magic);                                         \
            uint32_t odd = size >> (23 - (mantissa)) & 1, half = (1u << (22 - (mantissa))) - 1;                        \
            uint32_t normal = (size - ((uint32_t)(127 - (bias)) << 23) + half + odd) >> (23 - (mantissa));             \
            uint32_t rounded = size < (uint32_t)(128 - (bias)) << 23 ? small : normal;                                 \
            out[i] = (T)(rounded | (given >> 31) << (sign_shift));                                                     \
        }                                                                                                              \
    }                                                                                                                  \
    CLONES static void from_##name(const T *restrict in, uint64_t n, float scale, float *restrict out) {               \
        const float lift = as_float((uint32_t)(254 - (bias)) << 23);                                                   \
        for (uint64_t i = 0; i < n; i++) {                                                                             \
            uint32_t h = in[i], size = (h & ((1u << (sign_shift)) - 1)) << (23 - (mantissa));                          \
            float value = as_float(as_bits(as_float(size) * lift) | (h >> (sign_shift)) << 31);                        \
            out[i] = value * scale;                                                                                    \
        }                                                                                                              \
    }

SMALL_FLOAT(half, uint16_t, 10, 15, 15)
SMALL_FLOAT(e4m3, uint8_t, 3, 7, 7)
SMALL_FLOAT(e5m2, uint8_t, 2, 15, 7)

enum format { HALF, E4M3, E5M2 };

EXPORT void shoal_codec_narrow(const float *x, uint64_t n, uint64_t block, int format, float most, float *scales,
                               void *out) {
    for (uint64_t start = 0; start < n; start += block) {
        uint64_t m = n - start < block ? n - start : block;
        float scale = scale_of(x + start, m, LARGEST, most), by = scale == 0 ? 1 : scale;
        *scales++ = scale;
        if (format == HALF) to_half(x + start, m, by, most, (uint16_t *)out + start);
        if (format == E4M3) to_e4m3(x + start, m, by, most, (uint8_t *)out + start);
        if (format == E5M2) to_e5m2(x + start, m, by, most, (uint8_t *)out + start);
    }
}

EXPORT void shoal_codec_widen(const float *scales, const void *in, uint64_t n, uint64_t block, int format, float *out) {
    for (uint64_t start = 0; start < n; start += block) {
        uint64_t m = n - start < block ? n - start : block;
        float scale = *scales++;
        if (format == HALF) from_half((const uint16_t *)in + start, m, scale, out + start);
        if (format == E4M3) from_e4m3((const uint8_t *)in + start, m, scale, out + start);
        if (format == E5M2) from_e5m2((const uint8_t *)in + start, m, scale, out + start);
    }
}

EXPORT float shoal_codec_largest(const float *x, uint64_t n) { return as_float(largest_bits(x, n)); }

/* The places, ascending, of up to `room` numbers of magnitude `least` or more; returns how many there are in all.
   `places` has room for GROUP more. A group is compared into bytes of 0 and 1, eight to a word, whose lowest set bits
   are taken off one by one. Two are always taken, which no branch has to foresee: most words have no more. */
#define GROUP 16
#define END ((uint64_t)1 << 63)
CLONES static uint64_t select_groups(const float *x, uint64_t n, uint32_t from, int64_t *places, uint64_t room) {
    uint64_t found = 0;
    for (uint64_t start = 0; start < n; start += GROUP) {
        uint8_t selected[GROUP];
        uint64_t words[GROUP / 8];
        for (int i = 0; i < GROUP; i++) selected[i] = (as_bits(x[start + i]) & 0x7fffffff) >= from;
        memcpy(words, selected, sizeof words);
        if (!(words[0] | words[1])) continue;
        int64_t *out = places + (found < room ? found : room), *first = out;
        for (int word = 0; word < GROUP / 8; word++) {
            uint64_t rest = words[word], count = rest * 0x0101010101010101u >> 56;
            int64_t place = (int64_t)start + 8 * word;
            out[0] = place + __builtin_ctzll(rest | END) / 8, rest &= rest - 1;
            out[1] = place + __builtin_ctzll(rest | END) / 8, rest &= rest - 1;
            for (int i = 2; rest; rest &= rest - 1) out[i++] = place + __builtin_ctzll(rest) / 8;
            out += count;
        }
        found += (uint64_t)(out - first);
    }
    return found;
}

EXPORT uint64_t shoal_codec_select(const float *x, uint64_t n, float least, int64_t *places, uint64_t room) {
    uint32_t from = as_bits(least);
    uint64_t whole = n - n % GROUP, found = select_groups(x, whole, from, places, room);
    for (uint64_t i = whole; i < n; i++) {
        if ((as_bits(x[i]) & 0x7fffffff) < from) continue;
        if (found < room) places[found] = (int64_t)i;
        found++;
    }
    return found;
}

/* bfloat16 is the upper half of a float, rounded to nearest, ties to even. */
EXPORT CLONES void shoal_codec_to_bfloat16(const float *restrict x, uint64_t n, uint16_t *restrict out) {
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits = as_bits(x[i]), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

EXPORT CLONES void shoal_codec_from_bfloat16(const uint16_t *restrict in, uint64_t n, float *restrict out) {
    for (uint64_t i = 0; i < n; i++) out[i] = as_float((uint32_t)in[i] << 16);
}

/* Several vectors in one call: `places[v]` holds `sizes[v]` numbers. */
EXPORT double shoal_codec_squares(const float *const *places, const uint64_t *sizes, uint64_t vectors) {
    double total = 0;
    for (uint64_t v = 0; v < vectors; v++) total += sum_of_squares(places[v], sizes[v]);
    return total;
}

CLONES static void multiply(float *x, uint64_t n, float factor) {
    for (uint64_t i = 0; i < n; i++) x[i] *= factor;
}

EXPORT void shoal_codec_multiply(float *const *places, const uint64_t *sizes, uint64_t vectors, float factor) {
    for (uint64_t v = 0; v < vectors; v++) multiply(places[v], sizes[v], factor);
}

/* Both in one pass over memory: the sum of the squares that were there before, to the bit what `squares` gives. */
CLONES static double multiply_measured(float *x, uint64_t n, float factor) {
    double part[LANES] = {0}, total = 0;
    uint64_t whole = n - n % LANES;
    for (uint64_t i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float was = x[i + lane];
            part[lane] += SQUARE((double)was);
            x[i + lane] = was * factor;
        }
    for (uint64_t i = whole; i < n; i++) {
        float was = x[i];
        part[i - whole] += SQUARE((double)was);
        x[i] = was * factor;
    }
    for (int lane = 0; lane < LANES; lane++) total += part[lane];
    return total;
}

EXPORT double shoal_codec_multiply_measured(float *const *places, const uint64_t *sizes, uint64_t vectors,
                                            float factor) {
    double total = 0;
    for (uint64_t v = 0; v < vectors; v++) total += multiply_measured(places[v], sizes[v], factor);
    return total;
}
