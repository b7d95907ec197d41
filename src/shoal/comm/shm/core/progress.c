/* Who does a group's work: the caller who waits, else a thread.

   The thread has its share of a core, but does not interrupt who computes there each time that a peer wakes it
   (SCHED_BATCH). Where no core is to spare it would take turns with those who compute, to no avail. There, calls in
   windows rest: their callers go on with them when they next call or wait, or a peer that waits for long rings the
   thread. So do receives that fit in the rings. */

#define _GNU_SOURCE
#include "core.h"

#include <limits.h>
#include <sched.h>

#define IDLE_NS 10000000000L

void ring_done(group *g) {
    if (atomic_load(&g->done_sleepers) == 0) return;
    atomic_fetch_add(&g->done_bell.value, 1);
    futex_wake(&g->done_bell, INT_MAX);
}

static void pop(group *g) {
    pthread_mutex_lock(&g->queue_lock);
    op *call = g->calls.first;
    g->calls.first = call->next;
    if (g->calls.first == NULL) g->calls.end = &g->calls.first;
    atomic_fetch_sub(&g->waiting_calls, 1);
    if (call->rests) atomic_fetch_sub(&g->peers[g->rank]->resting.value, 1);
    pthread_mutex_unlock(&g->queue_lock);
    shoal_drop(call);
    ring_done(g);
}

static op *call_after(group *g, const op *call) {
    pthread_mutex_lock(&g->queue_lock);
    op *next = call == NULL ? g->calls.first : call->next;
    pthread_mutex_unlock(&g->queue_lock);
    return next;
}

op *first_call(group *g) { return call_after(g, NULL); }

static bool depends_on_any(group *g, const op *call, const op *first) {
    for (const op *before = first; before != call; before = call_after(g, before))
        if (depends(call, before)) return true;
    return false;
}

static void look_ahead(group *g, const op *first) {
    const op *before = first;
    for (op *call; before->window != NULL && (call = call_after(g, before)) != NULL; before = call)
        if (call->window == NULL || depends_on_any(g, call, first) || !step_ahead(call, before)) return;
}

/* Goes on with the calls, in order, as far as it can without waiting; the first that is blocked, and for what. */
op *advance(group *g, want *blocked) {
    for (op *call; (call = first_call(g)) != NULL; pop(g)) {
        int culprit, fault = group_fault(g, &culprit);
        if (atomic_load(&call->outcome) != PENDING) continue; /* it failed ahead of its turn */
        if (fault != NO_FAULT) fail(call, fault, culprit);
        else if (!step(call, blocked)) return look_ahead(g, call), call;
    }
    return NULL;
}

static bool is_late(const op *call) { return call != NULL && now_s() > atomic_load(&call->deadline_s); }

/* False: `call`, or `last` behind it, can go on no more, and the group fails. Asked when a slice of time has brought
   nothing. */
static bool is_well(group *g, const op *call, const op *last, const want *blocked) {
    int culprit, fault = peer_fault(g, blocked->rank, &culprit);
    if (reached(g, blocked->rank, blocked->field, blocked->value)) return true; /* it came before it went */
    if (fault == NO_FAULT && (is_late(call) || is_late(last))) fault = TIMED_OUT;
    if (fault != NO_FAULT) fail_group(g, fault, culprit);
    return fault == NO_FAULT;
}

/* Until `last` is over (NULL: until none is left), or a slice of time has passed. Under `turn_lock`. */
void run(group *g, const op *last, bool idle) {
    want blocked;
    for (;;) {
        op *call = advance(g, &blocked);
        if (call == NULL || (last != NULL && atomic_load(&last->outcome) != PENDING)) return;
        if (await(g, &blocked, idle)) continue;
        if (is_well(g, call, last, &blocked) && !reached(g, blocked.rank, blocked.field, blocked.value)) return;
    }
}

/* For those who poll for `last`. Under `turn_lock`. */
void advance_or_judge(group *g, const op *last) {
    want blocked;
    const op *call = advance(g, &blocked);
    if (call == NULL || now_s() - g->judged_s < 1e-9 * SLICE_NS) return;
    g->judged_s = now_s();
    if (!is_well(g, call, last, &blocked)) advance(g, &blocked);
}

bool all_rest(const group *g) {
    return atomic_load(&g->waiting_calls) <= (int)atomic_load(&g->peers[g->rank]->resting.value);
}

static void run_collectives(group *g) {
    worker *me = &g->collective_worker;
    uint32_t rung = atomic_load(&me->bell->value);
    bool mine = atomic_load(&g->waiting_calls) > 0 && atomic_load(&me->callers) == 0;
    if (!mine || pthread_mutex_trylock(&g->turn_lock) != 0) {
        if (!atomic_load(&g->ending)) futex_wait(me->bell, rung, IDLE_NS);
        return;
    }
    want blocked;
    bool rest = all_rest(g);
    if (rest) advance(g, &blocked);
    else run(g, NULL, false);
    pthread_mutex_unlock(&g->turn_lock);
    ring_done(g);
    if (rest && !atomic_load(&g->ending)) futex_wait(me->bell, rung, IDLE_NS);
}

bool look_at_messages(group *g) {
    pthread_mutex_lock(&g->message_lock);
    bool went = progress_messages(g);
    if (now_s() - g->checked_s > 1e-9 * SLICE_NS) check_messages(g), g->checked_s = now_s();
    if (g->failure != 0) drop_messages(g);
    pthread_mutex_unlock(&g->message_lock);
    return went;
}

static bool is_over(const group *g, const op *message) {
    return message == NULL ? atomic_load(&g->waiting_messages) == 0 : atomic_load(&message->outcome) != PENDING;
}

/* True: something went. */
static bool sleep_messages(group *g, const op *until, long ns) {
    header *mine = g->peers[g->rank];
    atomic_fetch_add(&mine->message_sleepers.value, 1);
    uint32_t rung = atomic_load(&mine->message_bell.value);
    bool went = look_at_messages(g) || is_over(g, until);
    if (!went && !atomic_load(&g->ending)) futex_wait(&mine->message_bell, rung, ns);
    atomic_fetch_sub(&mine->message_sleepers.value, 1);
    return went || look_at_messages(g);
}

/* Looks at all messages for a while; if nothing moves, sleeps until a peer rings, or for a slice of time. Peers whose
   receives rest while a ring to them is full are rung first. */
void wait_messages(group *g, const op *until) {
    for (uint32_t spin = 0; spin < g->settings.spins / 16; spin++) {
        if (is_over(g, until) || look_at_messages(g)) return;
        for (int i = 0; i < 16; i++) pause_core();
    }
    ring_receivers(g);
    if (!sleep_messages(g, until, PATIENCE_NS)) ring_receivers(g), sleep_messages(g, until, SLICE_NS);
}

static void run_messages(group *g) {
    worker *me = &g->message_worker;
    uint32_t rung = atomic_load(&me->bell->value);
    bool mine = atomic_load(&g->waiting_messages) > 0 && atomic_load(&me->callers) == 0;
    while (mine && look_at_messages(g)) continue;
    if (mine && !messages_rest(g)) wait_messages(g, NULL);
    else if (!atomic_load(&g->ending)) futex_wait(me->bell, rung, IDLE_NS);
}

static void be_patient(void) {
    struct sched_param none = {0};
    if (sched_getscheduler(0) == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &none);
}

static void *collective_thread(void *argument) {
    group *g = argument;
    be_patient();
    while (!atomic_load(&g->ending)) run_collectives(g);
    return NULL;
}

static void *message_thread(void *argument) {
    group *g = argument;
    while (!atomic_load(&g->ending)) run_messages(g);
    return NULL;
}

/* Where no thread can be made, those who wait do the work. */
void start_worker(group *g, worker *w) {
    void *(*body)(void *) = w == &g->message_worker ? message_thread : collective_thread;
    pthread_mutex_lock(&g->queue_lock);
    if (!w->runs && !atomic_load(&g->ending)) w->runs = pthread_create(&w->thread, NULL, body, g) == 0;
    pthread_mutex_unlock(&g->queue_lock);
}

void wake_worker(group *g, worker *w) {
    start_worker(g, w);
    ring(w->bell);
}
