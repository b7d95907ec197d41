/* A group's life, and who does its work: the caller who waits, else a thread.

   A call goes as far as it can without waiting when it is made. One that is waited for at once is then carried out by
   its caller: handing it to a thread and back would take longer than most calls do. For one that is left to itself, the
   thread is woken if its ranks still need something of this one. The thread has its share of a core, but does not
   interrupt who computes there each time that a peer wakes it (SCHED_BATCH).

   Where no core is to spare the thread would take turns with those who compute, to no avail. There, calls in windows
   rest: their callers go on with them when they next call or wait, or a peer that waits for long rings the thread. */

#define _GNU_SOURCE
#include "core.h"

#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define IDLE_NS 10000000000L

/* Whole groups */

EXPORT void *shoal_map(int descriptor, uint64_t bytes) {
    struct stat found;
    if (fstat(descriptor, &found) != 0 || (uint64_t)found.st_size != bytes) return NULL;
    void *segment = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return segment == MAP_FAILED ? NULL : segment;
}

EXPORT void shoal_unmap(void *segment, uint64_t bytes) { munmap(segment, bytes); }

/* A descriptor that can be read when the process at the other end of `stream` is over; -1 if there is no such thing. */
static int process_of(int stream) {
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (getsockopt(stream, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.pid <= 0) return -1;
#ifdef SYS_pidfd_open
    return (int)syscall(SYS_pidfd_open, peer.pid, 0);
#else
    return -1;
#endif
}

static void *array(int size, size_t bytes) { return calloc((size_t)size, bytes); }

static void free_group(group *g) {
    free(g->peers), free(g->streams), free(g->processes), free(g->outgoing), free(g->incoming);
    free(g->arrived);
    for (int field = 0; field < FIELDS; field++) free(g->seen[field]);
    pthread_mutex_destroy(&g->queue_lock), pthread_mutex_destroy(&g->turn_lock), pthread_mutex_destroy(&g->message_lock);
    free(g);
}

void release_group(group *g) {
    if (atomic_fetch_sub(&g->references, 1) == 1) free_group(g);
}

/* Takes over the segments and the streams (-1: this rank's own); NULL without memory, and then it does not. */
EXPORT group *shoal_open(int rank, int size, void *const *segments, const int *streams, const settings *chosen) {
    group *g = aligned_alloc(LINE, (sizeof *g + LINE - 1) / LINE * LINE);
    if (g == NULL) return NULL;
    memset(g, 0, sizeof *g);
    g->rank = rank, g->size = size, g->owner = getpid(), g->settings = *chosen;
    g->segment_bytes = shoal_segment_bytes(size, chosen);
    g->references = 1;
    g->users = 1;
    pthread_mutex_init(&g->queue_lock, NULL), pthread_mutex_init(&g->turn_lock, NULL);
    pthread_mutex_init(&g->message_lock, NULL);
    g->calls.end = &g->calls.first, g->asked.end = &g->asked.first;
    bool whole = (g->peers = array(size, sizeof *g->peers)) && (g->streams = array(size, sizeof(int))) &&
                 (g->processes = array(size, sizeof(int))) && (g->outgoing = array(size, sizeof(queue))) &&
                 (g->incoming = array(size, sizeof(incoming))) && (g->arrived = array(size, 8));
    for (int field = 0; field < FIELDS; field++) whole = (g->seen[field] = array(size, 8)) && whole;
    if (!whole) return free_group(g), NULL;
    for (int other = 0; other < size; other++) {
        g->peers[other] = segments[other];
        g->streams[other] = streams[other];
        g->processes[other] = streams[other] < 0 ? -1 : process_of(streams[other]);
        g->outgoing[other].end = &g->outgoing[other].first;
    }
    g->collective_worker.bell = &g->peers[rank]->helper, g->message_worker.bell = &g->messenger;
    return g;
}

static void leave(group *g) {
    uint32_t alive = ALIVE;
    atomic_compare_exchange_strong(&g->peers[g->rank]->life.value, &alive, LEFT);
    for (int rank = 0; rank < g->size; rank++) {
        ring(&g->peers[rank]->bell);
        ring_messages(g, rank);
    }
    for (int rank = 0; rank < g->size; rank++) {
        if (g->streams[rank] >= 0) close(g->streams[rank]);
        if (g->processes[rank] >= 0) close(g->processes[rank]);
    }
    for (int rank = 0; rank < g->size; rank++) munmap(g->peers[rank], g->segment_bytes);
}

bool join_users(group *g) {
    int users = atomic_load(&g->users);
    while (users > 0)
        if (atomic_compare_exchange_weak(&g->users, &users, users + 1)) return true;
    return false;
}

void part_users(group *g) {
    if (atomic_fetch_sub(&g->users, 1) == 1) leave(g);
}

/* Calls */

static void ring_done(group *g) {
    if (atomic_load(&g->done_sleepers) == 0) return;
    atomic_fetch_add(&g->done_bell.value, 1);
    futex_wake(&g->done_bell, INT_MAX);
}

EXPORT void shoal_drop(op *call) {
    if (atomic_fetch_sub(&call->references, 1) != 1) return;
    if (call->window != NULL) drop_window(call->window);
    release_group(call->group);
    free(call);
}

void finish(op *call, enum outcome outcome) { atomic_store(&call->outcome, (int)outcome); }

void fail(op *call, int fault, int culprit) {
    call->fault = fault, call->culprit = culprit;
    fail_group(call->group, fault, culprit);
    finish(call, BROKEN);
}

static op *new_op(group *g, const signature *what) {
    op *call = calloc(1, sizeof *call + 4 * 8 * (size_t)g->size);
    if (call == NULL) return NULL;
    call->group = g, call->what = *what;
    call->references = 2; /* the caller's and the queue's */
    call->deadline_s = now_s() + g->settings.timeout_s;
    call->send = (char **)(call + 1), call->receive = call->send + g->size;
    call->send_bytes = (uint64_t *)(call->receive + g->size), call->receive_bytes = call->send_bytes + g->size;
    atomic_fetch_add(&g->references, 1);
    return call;
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

static op *first_call(group *g) { return call_after(g, NULL); }

static void look_ahead(group *g, const op *before) {
    for (op *call; before->window != NULL && (call = call_after(g, before)) != NULL; before = call)
        if (call->window == NULL || !step_ahead(call, before)) return;
}

/* Goes on with the calls, in order, as far as it can without waiting; the first that is blocked, and for what. */
static op *advance(group *g, want *blocked) {
    for (op *call; (call = first_call(g)) != NULL; pop(g)) {
        int culprit, fault = group_fault(g, &culprit);
        if (atomic_load(&call->outcome) != PENDING) continue; /* it failed ahead of its turn */
        if (fault != NO_FAULT) fail(call, fault, culprit);
        else if (!step(call, blocked)) return look_ahead(g, call), call;
    }
    return NULL;
}

/* Until `last` is over (NULL: until none is left), or a slice of time has passed. Under `turn_lock`. */
static void run(group *g, const op *last, bool idle) {
    want blocked;
    for (;;) {
        op *call = advance(g, &blocked);
        if (call == NULL || (last != NULL && atomic_load(&last->outcome) != PENDING)) return;
        if (await(g, &blocked, idle)) continue;
        int culprit = blocked.rank, fault = peer_fault(g, blocked.rank, &culprit);
        if (reached(g, blocked.rank, blocked.field, blocked.value)) continue; /* it came before it went */
        if (fault == NO_FAULT && now_s() > call->deadline_s) fault = TIMED_OUT;
        if (fault == NO_FAULT) return;
        fail_group(g, fault, culprit);
    }
}

/* Threads */

static bool all_rest(const group *g) {
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

static bool look(group *g) {
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

/* Looks at all messages for a while; if nothing moves, sleeps until a peer rings, or for a slice of time. */
static void wait_messages(group *g, const op *until) {
    header *mine = g->peers[g->rank];
    for (uint32_t spin = 0; spin < g->settings.spins / 16; spin++) {
        if (is_over(g, until) || look(g)) return;
        for (int i = 0; i < 16; i++) pause_core();
    }
    atomic_fetch_add(&mine->message_sleepers.value, 1);
    uint32_t rung = atomic_load(&mine->message_bell.value);
    bool went = look(g);
    if (!went && !is_over(g, until) && !atomic_load(&g->ending)) futex_wait(&mine->message_bell, rung, SLICE_NS);
    atomic_fetch_sub(&mine->message_sleepers.value, 1);
}

static void run_messages(group *g) {
    worker *me = &g->message_worker;
    uint32_t rung = atomic_load(&me->bell->value);
    if (atomic_load(&g->waiting_messages) > 0 && atomic_load(&me->callers) == 0) wait_messages(g, NULL);
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
static void start_worker(group *g, worker *w, void *(*body)(void *)) {
    pthread_mutex_lock(&g->queue_lock);
    if (!w->runs) w->runs = pthread_create(&w->thread, NULL, body, g) == 0;
    pthread_mutex_unlock(&g->queue_lock);
}

static void wake_worker(group *g, worker *w, void *(*body)(void *)) {
    start_worker(g, w, body);
    ring(w->bell);
}

/* Making calls */

/* Whether the other ranks need nothing more of this one for this call. */
static bool owes_nothing(const op *call) {
    bool two_shots = call->what.kind <= REDUCE && !call->one_shot;
    return call->started && call->resolved && !two_shots && call->cursors[BROUGHT] == call->turns;
}

static void set_off(group *g, const op *call, uint64_t bytes, bool wait_at_once) {
    want blocked;
    bool rest = wait_at_once;
    if ((bytes <= g->settings.place_bytes || call->window != NULL) && pthread_mutex_trylock(&g->turn_lock) == 0) {
        advance(g, &blocked);
        bool over = atomic_load(&call->outcome) != PENDING;
        rest = rest || over || (first_call(g) == call && owes_nothing(call));
        pthread_mutex_unlock(&g->turn_lock);
        ring_done(g);
    }
    if (rest) return;
    if (call->rests) start_worker(g, &g->collective_worker, collective_thread);
    else wake_worker(g, &g->collective_worker, collective_thread);
}

static op *submit(op *call, bool wait_at_once, uint64_t bytes) {
    group *g = call->group;
    pthread_mutex_lock(&g->queue_lock);
    *g->calls.end = call;
    g->calls.end = &call->next;
    atomic_fetch_add(&g->waiting_calls, 1);
    call->rests = call->window != NULL && !g->settings.spare_core;
    if (call->rests) atomic_fetch_add(&g->peers[g->rank]->resting.value, 1);
    pthread_mutex_unlock(&g->queue_lock);
    set_off(g, call, bytes, wait_at_once);
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
    if (getpid() != g->owner) return NULL;
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
    if (getpid() != g->owner) return NULL;
    op *call = new_op(g, what);
    if (call == NULL) return NULL;
    size_t width = 8 * (size_t)g->size;
    memcpy(call->send, send, width), memcpy(call->send_bytes, send_bytes, width);
    memcpy(call->receive, receive, width), memcpy(call->receive_bytes, receive_bytes, width);
    return submit(call, wait_at_once, g->settings.place_bytes);
}

/* Whether all that is asked for can come without our help. */
static bool fits_ring(const group *g) {
    uint64_t bytes = 0;
    for (int rank = 0; rank < g->size; rank++)
        if (g->incoming[rank].target != NULL) bytes += g->incoming[rank].bytes;
    for (const op *asked = g->asked.first; asked != NULL; asked = asked->next) bytes += LINE + asked->receive_bytes[0];
    return bytes <= g->settings.ring_bytes / 2;
}

EXPORT op *shoal_message(group *g, int kind, char *data, uint64_t bytes, int peer, int64_t tag, bool wait_at_once) {
    signature what = {.kind = (uint32_t)kind, .dtype = BYTES, .root = peer, .bytes = bytes};
    op *message = getpid() == g->owner ? new_op(g, &what) : NULL;
    if (message == NULL) return NULL;
    message->peer = peer, message->tag = tag;
    message->send[0] = message->receive[0] = data;
    message->send_bytes[0] = message->receive_bytes[0] = bytes;
    pthread_mutex_lock(&g->message_lock);
    post_message(message);
    if (g->failure != 0) drop_messages(g);
    bool rests = atomic_load(&message->outcome) != PENDING || (kind == RECV && fits_ring(g));
    pthread_mutex_unlock(&g->message_lock);
    if (!rests && !wait_at_once) wake_worker(g, &g->message_worker, message_thread);
    return message;
}

/* Waiting */

static bool is_message(const op *call) { return call->what.kind == SEND || call->what.kind == RECV; }

static void wait_call(group *g, op *call, bool idle) {
    uint32_t rung = atomic_load(&g->done_bell.value);
    if (pthread_mutex_trylock(&g->turn_lock) == 0) {
        run(g, call, idle);
        pthread_mutex_unlock(&g->turn_lock);
        ring_done(g);
        return;
    }
    atomic_fetch_add(&g->done_sleepers, 1);
    rung = atomic_load(&g->done_bell.value);
    bool free_now = pthread_mutex_trylock(&g->turn_lock) == 0;
    if (free_now) pthread_mutex_unlock(&g->turn_lock);
    if (!free_now && atomic_load(&call->outcome) == PENDING) futex_wait(&g->done_bell, rung, SLICE_NS);
    atomic_fetch_sub(&g->done_sleepers, 1);
}

/* PENDING after `patience_s`, or what became of the call; FOREIGN in a child that was forked. `idle`: the process has
   nothing else to do meanwhile. */
EXPORT int shoal_wait(op *call, double patience_s, bool idle) {
    group *g = call->group;
    int outcome = atomic_load(&call->outcome);
    if (outcome != PENDING) return outcome;
    if (getpid() != g->owner) return FOREIGN;
    if (!join_users(g)) return atomic_load(&call->outcome);
    worker *w = is_message(call) ? &g->message_worker : &g->collective_worker;
    double until_s = now_s() + patience_s;
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
    wake_worker(g, &g->collective_worker, collective_thread);
    part_users(g);
}

/* What became of the call so far; goes on with it if nobody does. */
EXPORT int shoal_test(op *call) {
    group *g = call->group;
    int outcome = atomic_load(&call->outcome);
    if (outcome != PENDING || getpid() != g->owner || !join_users(g)) return atomic_load(&call->outcome);
    pthread_mutex_t *lock = is_message(call) ? &g->message_lock : &g->turn_lock;
    want blocked;
    if (pthread_mutex_trylock(lock) == 0) {
        if (is_message(call)) progress_messages(g);
        else advance(g, &blocked);
        pthread_mutex_unlock(lock);
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

static bool something_left(group *g) {
    bool sends = false;
    pthread_mutex_lock(&g->message_lock);
    for (int rank = 0; rank < g->size; rank++) sends |= g->outgoing[rank].first != NULL;
    pthread_mutex_unlock(&g->message_lock);
    return sends;
}

static void join_thread(group *g, const worker *w) {
    pthread_mutex_lock(&g->queue_lock);
    bool runs = w->runs;
    pthread_mutex_unlock(&g->queue_lock);
    if (runs) pthread_join(w->thread, NULL);
}

/* Finishes the calls that were made, but for receives; then the peers find that this rank has left. */
EXPORT void shoal_end(group *g) {
    if (getpid() != g->owner) return; /* a child that was forked has nothing to say here */
    while (atomic_load(&g->waiting_calls) > 0) {
        pthread_mutex_lock(&g->turn_lock);
        run(g, NULL, true);
        pthread_mutex_unlock(&g->turn_lock);
        ring_done(g);
    }
    while (something_left(g)) wait_messages(g, NULL);
    atomic_store(&g->ending, true);
    ring(g->collective_worker.bell), ring(g->message_worker.bell);
    ring(&g->peers[g->rank]->message_bell);
    join_thread(g, &g->collective_worker);
    join_thread(g, &g->message_worker);
    pthread_mutex_lock(&g->message_lock);
    uint32_t none = 0;
    atomic_compare_exchange_strong(&g->failure, &none, (uint32_t)CLOSED | (uint32_t)(g->rank + 1) << 8);
    drop_messages(g);
    pthread_mutex_unlock(&g->message_lock);
    part_users(g);
    release_group(g);
}

/* Tests: another rank is told that this one has failed, as if it had. */
EXPORT void shoal_break(group *g, int fault, int culprit) { fail_group(g, fault, culprit); }
