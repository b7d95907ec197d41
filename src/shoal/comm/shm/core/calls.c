/* Making calls, and waiting for them.

   A call goes as far as it can without waiting when it is made. One that is waited for at once is then carried out by
   its caller: handing it to a thread and back would take longer than most calls do. For one that is left to itself, the
   thread is woken if its ranks still need something of this one (`progress.c`). */

#define _GNU_SOURCE
#include "core.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

/* Whether the other ranks need nothing more of this one for this call. In a window they do: it reads their memory. */
static bool owes_nothing(const op *call) {
    bool two_shots = call->what.kind <= REDUCE && !call->one_shot;
    return call->window == NULL && call->started && call->resolved && !two_shots && call->cursors[BROUGHT] == call->turns;
}

static void set_off(group *g, const op *call, uint64_t bytes, bool wait_at_once) {
    want blocked;
    bool left_alone = wait_at_once;
    if ((bytes <= g->settings.place_bytes || call->window != NULL) && pthread_mutex_trylock(&g->turn_lock) == 0) {
        advance(g, &blocked);
        bool over = atomic_load(&call->outcome) != PENDING;
        left_alone = left_alone || over || (first_call(g) == call && owes_nothing(call));
        pthread_mutex_unlock(&g->turn_lock);
        ring_done(g);
    }
    if (left_alone) return;
    if (call->rests) start_worker(g, &g->collective_worker);
    else wake_worker(g, &g->collective_worker);
}

static op *submit(op *call, bool wait_at_once, uint64_t bytes) {
    group *g = call->group;
    tell_core(g);
    pthread_mutex_lock(&g->queue_lock);
    *g->calls.end = call;
    g->calls.end = &call->next;
    atomic_fetch_add(&g->waiting_calls, 1);
    call->rests = call->window != NULL && !g->settings.spare_core;
    if (call->rests) atomic_fetch_add(&g->peers[g->rank]->resting.value, 1);
    pthread_mutex_unlock(&g->queue_lock);
    set_off(g, call, bytes, wait_at_once);
    part_users(g);
    return call;
}

/* Where all of it lies in memory that all ranks have mapped, and what goes on there needs no other memory of the
   peers, it is carried out there; small calls are not, as two waits take longer than a copy and one. */
static void find_window(op *call, char *send, char *receive) {
    group *g = call->group;
    uint64_t n = (uint64_t)g->size, bytes = call->what.bytes, whole = bytes;
    char *from = send;
    bool may = false;
    if (call->what.kind == ALL_REDUCE) may = send == receive;
    if (call->what.kind == REDUCE_SCATTER) may = true, whole *= n;
    if (call->what.kind == ALL_GATHER) may = send == receive + bytes * (uint64_t)g->rank, whole *= n, from = receive;
    if (!may || whole <= g->settings.one_shot_bytes) return;
    call->window = window_of(g, from, whole);
    if (call->window == NULL) return;
    call->what.window = call->window->number;
    call->what.offset = (uint64_t)(from - call->window->maps[g->rank]);
}

/* A collective of contiguous memory; `bytes` is the block of one rank, where there are blocks, else all of it. */
EXPORT op *shoal_start(group *g, const signature *what, char *send, char *receive, bool wait_at_once) {
    op *call = new_op(g, what);
    if (call == NULL) return NULL;
    bool out_blocks = what->kind == REDUCE_SCATTER || what->kind == ALL_TO_ALL;
    bool in_blocks = what->kind == ALL_GATHER || what->kind == ALL_TO_ALL;
    for (int rank = 0; rank < g->size; rank++) {
        call->send[rank] = send + (out_blocks ? what->bytes * (uint64_t)rank : 0);
        call->receive[rank] = receive + (in_blocks ? what->bytes * (uint64_t)rank : 0);
        call->send_bytes[rank] = call->receive_bytes[rank] = what->bytes;
    }
    if (what->kind == ALL_TO_ALL) call->what.bytes = 0; /* blocks are compared one by one */
    find_window(call, send, receive);
    return submit(call, wait_at_once, what->bytes);
}

/* The same of memory here and there. */
EXPORT op *shoal_start_lists(group *g, const signature *what, char *const *send, const uint64_t *send_bytes,
                      char *const *receive, const uint64_t *receive_bytes, bool wait_at_once) {
    op *call = new_op(g, what);
    if (call == NULL) return NULL;
    size_t width = 8 * (size_t)g->size;
    memcpy(call->send, send, width), memcpy(call->send_bytes, send_bytes, width);
    memcpy(call->receive, receive, width), memcpy(call->receive_bytes, receive_bytes, width);
    return submit(call, wait_at_once, g->settings.place_bytes);
}

EXPORT op *shoal_message(group *g, int kind, int dtype, char *data, uint64_t bytes, int peer, int64_t tag,
                         bool wait_at_once) {
    signature what = {.kind = (uint32_t)kind, .dtype = (uint32_t)dtype, .root = peer, .bytes = bytes};
    op *message = new_op(g, &what);
    if (message == NULL) return NULL;
    message->peer = peer, message->tag = tag;
    message->deadline_s = INFINITY;
    message->send[0] = message->receive[0] = data;
    message->send_bytes[0] = message->receive_bytes[0] = bytes;
    pthread_mutex_lock(&g->message_lock);
    post_message(message);
    if (g->failure != 0) drop_messages(g);
    bool over = atomic_load(&message->outcome) != PENDING, rests = kind == RECV && fits_ring(g);
    pthread_mutex_unlock(&g->message_lock);
    if (!over && rests) start_worker(g, &g->message_worker);
    else if (!over && !wait_at_once) wake_worker(g, &g->message_worker);
    part_users(g);
    return message;
}

/* Waiting */

static bool is_message(const op *call) { return call->what.kind == SEND || call->what.kind == RECV; }

static void wait_call(group *g, op *call, bool idle) {
    if (pthread_mutex_trylock(&g->turn_lock) == 0) {
        run(g, call, idle);
        pthread_mutex_unlock(&g->turn_lock);
        ring_done(g);
        return;
    }
    atomic_fetch_add(&g->done_sleepers, 1);
    uint32_t rung = atomic_load(&g->done_bell.value);
    bool free_now = pthread_mutex_trylock(&g->turn_lock) == 0;
    if (free_now) pthread_mutex_unlock(&g->turn_lock);
    if (!free_now && atomic_load(&call->outcome) == PENDING) futex_wait(&g->done_bell, rung, SLICE_NS);
    atomic_fetch_sub(&g->done_sleepers, 1);
}

/* A call that was made while its group ended, and that nobody goes on with. */
static int left_behind(op *call) {
    int pending = PENDING;
    call->fault = atomic_load(&call->outcome) == PENDING ? CLOSED : call->fault;
    atomic_compare_exchange_strong(&call->outcome, &pending, BROKEN);
    return atomic_load(&call->outcome);
}

/* PENDING after `patience_s`, or what became of the call; FOREIGN in a child that was forked. `idle`: the process has
   nothing else to do meanwhile. */
EXPORT int shoal_wait(op *call, double patience_s, bool idle) {
    group *g = call->group;
    int outcome = atomic_load(&call->outcome);
    if (outcome != PENDING) return outcome;
    if (getpid() != g->owner) return FOREIGN;
    if (!join_users(g)) return left_behind(call);
    worker *w = is_message(call) ? &g->message_worker : &g->collective_worker;
    double until_s = now_s() + patience_s;
    if (is_message(call)) set_deadline(call);
    atomic_fetch_add(&w->callers, 1);
    do {
        if (is_message(call)) wait_messages(g, call);
        else wait_call(g, call, idle);
        outcome = atomic_load(&call->outcome);
    } while (outcome == PENDING && now_s() < until_s);
    bool last = atomic_fetch_sub(&w->callers, 1) == 1;
    bool more = is_message(call) ? atomic_load(&g->waiting_messages) > 0 : !all_rest(g);
    if (last && more) ring(w->bell);
    part_users(g);
    return outcome;
}

/* Who waited for the call does no more: the thread goes on with it, as it does with messages in any case. */
EXPORT void shoal_leave(const op *call) {
    group *g = call->group;
    if (is_message(call) || getpid() != g->owner || !join_users(g)) return;
    wake_worker(g, &g->collective_worker);
    part_users(g);
}

/* A call may take so long, instead of the group's timeout. */
EXPORT void shoal_limit(op *call, double timeout_s) { atomic_store(&call->deadline_s, now_s() + timeout_s); }

/* What became of the call so far; goes on with it if nobody does. */
EXPORT int shoal_test(op *call) {
    group *g = call->group;
    int outcome = atomic_load(&call->outcome);
    if (outcome != PENDING || getpid() != g->owner) return outcome;
    if (!join_users(g)) return left_behind(call);
    if (is_message(call)) {
        look_at_messages(g);
    } else if (pthread_mutex_trylock(&g->turn_lock) == 0) {
        advance_or_judge(g, call);
        pthread_mutex_unlock(&g->turn_lock);
        ring_done(g);
    }
    part_users(g);
    return atomic_load(&call->outcome);
}

/* Why a call failed: enum fault, the rank to blame, what this rank called and what that one did, who sent. */
EXPORT void shoal_report(const op *call, int *fault, int *culprit, signature *ours, signature *theirs, int *peer) {
    *fault = call->fault, *culprit = call->culprit;
    *ours = call->what, *theirs = call->theirs, *peer = call->peer;
    if (call->fault == WRONG_SIZE && !is_message(call)) ours->bytes = call->receive_bytes[call->culprit];
}
