/* Waiting for a peer: look for a while, then sleep in the kernel; now and then, see whether it still lives. */

#define _GNU_SOURCE
#include "core.h"

#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOKS_A_YIELD 16

double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void futex_wait(word *w, uint32_t seen, long ns) {
    struct timespec t = {ns / 1000000000L, ns % 1000000000L};
    syscall(SYS_futex, &w->value, FUTEX_WAIT, seen, &t, NULL, 0);
}

void futex_wake(word *w, int count) { syscall(SYS_futex, &w->value, FUTEX_WAKE, count, NULL, NULL, 0); }

static uint64_t packed_want(int rank, enum field field, uint64_t value) {
    return (uint64_t)(rank + 1) << 50 | (uint64_t)field << 48 | (value & 0xffffffffffff);
}

void ring(word *bell) {
    atomic_fetch_add(&bell->value, 1);
    futex_wake(bell, INT_MAX);
}

void publish(group *g, enum field field, uint64_t value) {
    header *mine = g->peers[g->rank];
    atomic_store(&mine->fields[field].value, value);
    for (int rank = 0; rank < g->size; rank++) {
        uint64_t wanted = rank == g->rank ? 0 : atomic_load(&g->peers[rank]->want.value);
        if (wanted >> 48 != packed_want(g->rank, field, 0) >> 48 || (wanted & 0xffffffffffff) > value) continue;
        if (atomic_compare_exchange_strong(&g->peers[rank]->want.value, &wanted, 0)) ring(&g->peers[rank]->bell);
    }
}

bool reached(group *g, int rank, enum field field, uint64_t value) {
    uint64_t *seen = &g->seen[field][rank];
    if (*seen < value) *seen = atomic_load_explicit(&g->peers[rank]->fields[field].value, memory_order_acquire);
    return *seen >= value;
}

static bool sleep_for(group *g, const want *w, long ns) {
    header *mine = g->peers[g->rank];
    uint32_t rung = atomic_load(&mine->bell.value);
    atomic_store(&mine->want.value, packed_want(w->rank, w->field, w->value));
    bool there = atomic_load(&g->peers[w->rank]->fields[w->field].value) >= w->value;
    bool well = atomic_load(&g->peers[w->rank]->life.value) == ALIVE;
    if (!there && well && !atomic_load(&g->ending)) futex_wait(&mine->bell, rung, ns);
    atomic_store(&mine->want.value, 0);
    return reached(g, w->rank, w->field, w->value);
}

static bool look(group *g, const want *w, uint32_t times) {
    for (uint32_t spin = 0; spin < times; spin++) {
        if (reached(g, w->rank, w->field, w->value)) return true;
        pause_core();
    }
    return false;
}

/* Being woken takes longer than most calls. Who has nothing else to do looks on, and yields its core between looks. */
static bool look_on(group *g, const want *w) {
    look_for_room(g, w->rank);
    for (double until_s = now_s() + 1e-9 * LOOK_NS; now_s() < until_s;) {
        sched_yield();
        if (look(g, w, LOOKS_A_YIELD)) return true;
    }
    return false;
}

bool await(group *g, const want *w, bool idle) {
    if (look(g, w, g->settings.spins) || (idle && g->settings.spins > 0 && look_on(g, w))) return true;
    if (sleep_for(g, w, PATIENCE_NS)) return true;
    header *peer = g->peers[w->rank];
    if (atomic_load(&peer->resting.value) > 0) ring(&peer->helper);
    return sleep_for(g, w, SLICE_NS);
}

static bool gone(int descriptor, short events) {
    struct pollfd watched = {descriptor, events, 0};
    return descriptor >= 0 && poll(&watched, 1, 0) > 0 && watched.revents != 0;
}

/* NO_FAULT, or why nothing more will come from this rank. */
int peer_fault(group *g, int rank, int *culprit) {
    header *peer = g->peers[rank];
    *culprit = rank;
    switch (atomic_load(&peer->life.value)) {
    case FAILED:
        *culprit = atomic_load(&peer->culprit);
        return PEER_FAILED;
    case LEFT:
        return PEER_LEFT;
    }
    return gone(g->streams[rank], POLLRDHUP) || gone(g->processes[rank], POLLIN) ? PEER_DEAD : NO_FAULT;
}

/* What the group failed of, for good; NO_FAULT while it is well. What is wrong with one call is EARLIER for others. */
int group_fault(const group *g, int *culprit) {
    uint32_t failure = atomic_load(&g->failure);
    int fault = (int)(failure & 0xff);
    *culprit = (int)(failure >> 8) - 1;
    return fault == DISAGREE || fault == WRONG_SIZE || fault == UNSHARED ? EARLIER : fault;
}

/* The first failure is the group's; the peers learn of it at once. */
void fail_group(group *g, int fault, int culprit) {
    uint32_t none = 0, failure = (uint32_t)fault | (uint32_t)(culprit + 1) << 8;
    if (!atomic_compare_exchange_strong(&g->failure, &none, failure)) return;
    header *mine = g->peers[g->rank];
    uint32_t alive = ALIVE;
    atomic_store(&mine->culprit, culprit);
    atomic_compare_exchange_strong(&mine->life.value, &alive, FAILED);
    for (int rank = 0; rank < g->size; rank++) {
        ring(&g->peers[rank]->bell);
        ring(&g->peers[rank]->message_bell);
    }
}

void ring_messages(group *g, int rank) {
    if (atomic_load(&g->peers[rank]->message_sleepers.value) == 0) return;
    ring(&g->peers[rank]->message_bell);
}
