/* LAMB and LARS (shoal.optim.layerwise, whose torch forms are the oracle), in two passes each: one for moments and sums of
   squares, and, when the norms of whole parameters are known, one for the step. Nothing in between is stored: the second
   pass computes an update of LAMB again from its moments, which costs less than writing and reading it. */

#include "kernels.h"

#include <math.h>

#define LANES 16
#define TILE 1024

/* Sums of squares in float32 within a tile, lane by lane, and in float64 beyond: the order is the same on every
   processor. */
struct sums {
    float part[2][LANES];
    double total[2];
};

static void flush(struct sums *sums) {
    for (int of = 0; of < 2; of++)
        for (int lane = 0; lane < LANES; lane++) sums->total[of] += (double)sums->part[of][lane], sums->part[of][lane] = 0;
}

#define INLINE static inline __attribute__((always_inline))

INLINE float update_of(float p, float m, float v, float first, float root, float eps, float decay) {
    return m * first / (sqrtf(v) * root + eps) + decay * p;
}

/* `with`: beta1, 1 - beta1, beta2, 1 - beta2, what m is multiplied by to correct it, and the root of v, eps, the decay that
   belongs to the update. */
CLONES static void moments_tile(const float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                                uint64_t n, const float *restrict with, float *restrict of_p, float *restrict of_u) {
    float beta1 = with[0], rest1 = with[1], beta2 = with[2], rest2 = with[3];
    float first = with[4], root = with[5], eps = with[6], decay = with[7];
    float a[LANES] = {0}, b[LANES] = {0};
    uint64_t whole = n - n % LANES;
    for (uint64_t i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            uint64_t at = i + lane;
            float m1 = m[at] * beta1 + g[at] * rest1, v1 = v[at] * beta2 + g[at] * g[at] * rest2;
            float u = update_of(p[at], m1, v1, first, root, eps, decay);
            m[at] = m1, v[at] = v1;
            a[lane] += p[at] * p[at], b[lane] += u * u;
        }
    for (uint64_t at = whole; at < n; at++) {
        float m1 = m[at] * beta1 + g[at] * rest1, v1 = v[at] * beta2 + g[at] * g[at] * rest2;
        float u = update_of(p[at], m1, v1, first, root, eps, decay);
        m[at] = m1, v[at] = v1;
        a[at - whole] += p[at] * p[at], b[at - whole] += u * u;
    }
    for (int lane = 0; lane < LANES; lane++) of_p[lane] = a[lane], of_u[lane] = b[lane];
}

/* The first pass of LAMB over `n` numbers. Writes both sums of squares, of p and of the update, to `squares`. */
EXPORT void shoal_codec_lamb_moments(const float *p, const float *g, float *m, float *v, uint64_t n, const float *with,
                                     double *squares) {
    struct sums sums = {{{0}}, {0}};
    for (uint64_t at = 0; at < n; at += TILE) {
        uint64_t size = n - at < TILE ? n - at : TILE;
        moments_tile(p + at, g + at, m + at, v + at, size, with, sums.part[0], sums.part[1]);
        flush(&sums);
    }
    squares[0] = sums.total[0], squares[1] = sums.total[1];
}

/* The second: p <- kept p - rate u. */
EXPORT CLONES void shoal_codec_lamb_step(float *restrict p, const float *restrict m, const float *restrict v, uint64_t n,
                                         const float *restrict with, float kept, float rate) {
    float first = with[4], root = with[5], eps = with[6], decay = with[7];
    for (uint64_t i = 0; i < n; i++) p[i] = p[i] * kept - update_of(p[i], m[i], v[i], first, root, eps, decay) * rate;
}

CLONES static void squares_tile(const float *restrict x, uint64_t n, float *restrict out) {
    float a[LANES] = {0};
    uint64_t whole = n - n % LANES;
    for (uint64_t i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) a[lane] += x[i + lane] * x[i + lane];
    for (uint64_t i = whole; i < n; i++) a[i - whole] += x[i] * x[i];
    for (int lane = 0; lane < LANES; lane++) out[lane] = a[lane];
}

/* The first pass of LARS: the sums of squares of p and g. */
EXPORT void shoal_codec_lars_norms(const float *p, const float *g, uint64_t n, double *squares) {
    struct sums sums = {{{0}}, {0}};
    for (uint64_t at = 0; at < n; at += TILE) {
        uint64_t size = n - at < TILE ? n - at : TILE;
        squares_tile(p + at, size, sums.part[0]);
        squares_tile(g + at, size, sums.part[1]);
        flush(&sums);
    }
    squares[0] = sums.total[0], squares[1] = sums.total[1];
}

/* The second: s = (g + decay p) factor, v <- momentum v + s, p <- p - lr v, or lr (s + momentum v) of Nesterov's form. */
EXPORT CLONES void shoal_codec_lars_step(float *restrict p, const float *restrict g, float *restrict v, uint64_t n,
                                         float factor, float decay, float momentum, float lr, int nesterov) {
    float own = nesterov ? lr : 0, kept = nesterov ? lr * momentum : lr;
    for (uint64_t i = 0; i < n; i++) {
        float s = (g[i] + decay * p[i]) * factor, v1 = v[i] * momentum + s;
        v[i] = v1;
        p[i] -= own * s + kept * v1;
    }
}
