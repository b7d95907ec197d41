/* `cores.c` on a machine that a test plays: it says who is on which core, and sees which cores are asked for. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>

static int stands_on;
static unsigned allowed_bits, asked_bits;
static int askings;

static unsigned bits_of(const cpu_set_t *set) {
    unsigned bits = 0;
    for (unsigned core = 0; core < 32; core++) bits |= CPU_ISSET(core, set) ? 1u << core : 0;
    return bits;
}

static int played_getcpu(void) { return stands_on; }

static int played_getaffinity(int who, size_t bytes, cpu_set_t *set) {
    (void)who, (void)bytes;
    CPU_ZERO(set);
    for (unsigned core = 0; core < 32; core++)
        if (allowed_bits >> core & 1) CPU_SET(core, set);
    return 0;
}

static int played_setaffinity(int who, size_t bytes, const cpu_set_t *set) {
    (void)who, (void)bytes;
    if (askings++ == 0) asked_bits = bits_of(set);
    allowed_bits = bits_of(set);
    if (!(allowed_bits >> stands_on & 1)) stands_on = __builtin_ctz(allowed_bits);
    return 0;
}

#define sched_getcpu played_getcpu
#define sched_getaffinity played_getaffinity
#define sched_setaffinity played_setaffinity
#include "cores.c"

EXPORT group *played_open(int size, unsigned allowed) {
    group *g = aligned_alloc(LINE, (sizeof *g + LINE - 1) / LINE * LINE);
    *g = (group){.size = size, .shared_waits_borne = FEWEST_SHARED_WAITS};
    g->peers = malloc((size_t)size * sizeof *g->peers);
    for (int rank = 0; rank < size; rank++) {
        g->peers[rank] = aligned_alloc(LINE, sizeof(header));
        *g->peers[rank] = (header){0};
    }
    allowed_bits = allowed;
    return g;
}

EXPORT void played_allow(unsigned allowed) { allowed_bits = allowed, stands_on = 0; }

EXPORT int played_askings(void) { return askings; }

EXPORT void played_close(group *g) {
    for (int rank = 0; rank < g->size; rank++) free(g->peers[rank]);
    free(g->peers), free(g);
}

EXPORT void played_tell(group *g, int rank, int core) { atomic_store(&g->peers[rank]->core, core + 1); }

/* Rank 0 waits for `rank` on `core`: the cores that it asked for at first (bits; 0: it asked for none), and after. */
EXPORT unsigned played_wait(group *g, int rank, int core, unsigned *after) {
    stands_on = core, asked_bits = 0, askings = 0;
    look_for_room(g, rank);
    *after = allowed_bits;
    return asked_bits;
}
