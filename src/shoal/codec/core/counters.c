/* Random numbers from counters (shoal.maths.counter, whose torch form is the oracle): masks of dropout, bits, and
   uniform numbers of them. */

#include "kernels.h"

#define GAMMA 0x9E3779B97F4A7C15u

static inline __attribute__((always_inline)) uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

CLONES static void mask_row(uint64_t key, uint64_t n, int64_t least, float kept, float *restrict out) {
    for (uint64_t i = 0; i < n; i++) out[i] = (int64_t)mixed(key + (i + 1) * GAMMA) >= least ? kept : 0.0f;
}

/* For each of `samples`, of which the keys are given, `rows` of `n` numbers, which count on from where `first` says:
   `kept` where the bits are `least` or more, else 0. `layer` is the key of the draw. */
EXPORT void shoal_codec_mask(const int64_t *keys, uint64_t samples, uint64_t layer, const int64_t *first, uint64_t rows,
                             uint64_t n, int64_t least, float kept, float *out) {
    for (uint64_t sample = 0; sample < samples; sample++) {
        uint64_t key = mixed((uint64_t)keys[sample] + (layer + 1) * GAMMA);
        for (uint64_t row = 0; row < rows; row++, out += n)
            mask_row(key + (uint64_t)first[row] * GAMMA, n, least, kept, out);
    }
}

CLONES static void bits_row(uint64_t key, uint64_t n, int64_t *restrict out) {
    for (uint64_t i = 0; i < n; i++) out[i] = (int64_t)mixed(key + (i + 1) * GAMMA);
}

/* The same, of the bits themselves. */
EXPORT void shoal_codec_bits(const int64_t *keys, uint64_t samples, uint64_t layer, const int64_t *first, uint64_t rows,
                             uint64_t n, int64_t *out) {
    for (uint64_t sample = 0; sample < samples; sample++) {
        uint64_t key = mixed((uint64_t)keys[sample] + (layer + 1) * GAMMA);
        for (uint64_t row = 0; row < rows; row++, out += n) bits_row(key + (uint64_t)first[row] * GAMMA, n, out);
    }
}

static inline double as_double(uint64_t bits) {
    double d;
    memcpy(&d, &bits, 8);
    return d;
}

/* (k + 1/2) / 2^52, k the upper bits of number `counter` of the stream of each key: 1 + k / 2^52 is put together, and
   the difference is exact. */
EXPORT CLONES void shoal_codec_uniform64(const int64_t *restrict keys, uint64_t n, uint64_t counter,
                                         double *restrict out) {
    for (uint64_t i = 0; i < n; i++) {
        uint64_t cell = mixed((uint64_t)keys[i] + (counter + 1) * GAMMA) >> 12;
        out[i] = as_double(0x3ff0000000000000u | cell) - (1.0 - 0x1p-53);
    }
}

/* (k + 1/2) / 2^23. */
EXPORT CLONES void shoal_codec_uniform32(const int64_t *restrict keys, uint64_t n, uint64_t counter,
                                         float *restrict out) {
    for (uint64_t i = 0; i < n; i++) {
        int32_t cell = (int32_t)(mixed((uint64_t)keys[i] + (counter + 1) * GAMMA) >> 41);
        out[i] = (float)cell * 0x1p-23f + 0x1p-24f;
    }
}
