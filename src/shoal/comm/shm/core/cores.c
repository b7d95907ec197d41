/* Ranks that share a core while another one is free.

   A kernel that wakes a rank on the core of whoever woke it may leave both there for the whole of a program: on virtual
   machines it does. Each call then ends when the other rank next sleeps. Who again and again waits for a rank of its
   own core moves to one that no rank of the group is on, and the other goes on meanwhile. It is not bound there: the
   kernel may move it as before. Where that does not help it is tried ever less often. */

#define _GNU_SOURCE
#include "core.h"

#include <sched.h>

#define MOST_SHARED_WAITS 768 /* a doubling of the fewest */

static int core_of(const group *g, int rank) {
    return atomic_load_explicit(&g->peers[rank]->core, memory_order_relaxed) - 1;
}

void tell_core(group *g) {
    atomic_store_explicit(&g->peers[g->rank]->core, sched_getcpu() + 1, memory_order_relaxed);
}

static void move(group *g) {
    cpu_set_t allowed, vacant;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    vacant = allowed;
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank && core_of(g, rank) >= 0) CPU_CLR((size_t)core_of(g, rank), &vacant);
    if (CPU_COUNT(&vacant) == 0 || sched_setaffinity(0, sizeof vacant, &vacant) != 0) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
    tell_core(g);
}

void look_for_room(group *g, int rank) {
    if (core_of(g, rank) != sched_getcpu()) {
        g->shared_waits = 0;
        if (g->shared_waits_borne > FEWEST_SHARED_WAITS) g->shared_waits_borne--;
    } else if (++g->shared_waits >= g->shared_waits_borne) {
        move(g);
        g->shared_waits = 0;
        if (g->shared_waits_borne < MOST_SHARED_WAITS) g->shared_waits_borne *= 2;
    }
}
