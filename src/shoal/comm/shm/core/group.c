/* A group's life: its segments and descriptors, who uses them, and its end. */

#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

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
    g->collective_worker.bell = &g->peers[rank]->helper, g->message_worker.bell = &g->peers[rank]->messenger;
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

/* NULL: without memory, in another process than the one that made the group, or after its end. Else the caller is one of
   the group's users. */
op *new_op(group *g, const signature *what) {
    if (getpid() != g->owner || !join_users(g)) return NULL;
    op *call = calloc(1, sizeof *call + 4 * 8 * (size_t)g->size);
    if (call == NULL) return part_users(g), NULL;
    call->group = g, call->what = *what;
    call->references = 2; /* the caller's and the queue's */
    call->deadline_s = now_s() + g->settings.timeout_s;
    call->send = (char **)(call + 1), call->receive = call->send + g->size;
    call->send_bytes = (uint64_t *)(call->receive + g->size), call->receive_bytes = call->send_bytes + g->size;
    atomic_fetch_add(&g->references, 1);
    return call;
}

/* Whether messages are still to go out; they may take the timeout from now on. */
static bool sends_left(group *g) {
    bool sends = false;
    pthread_mutex_lock(&g->message_lock);
    for (int rank = 0; rank < g->size; rank++)
        for (op *send = g->outgoing[rank].first; send != NULL; send = send->next) set_deadline(send), sends = true;
    pthread_mutex_unlock(&g->message_lock);
    return sends;
}

static void join_thread(group *g, const worker *w) {
    pthread_mutex_lock(&g->queue_lock);
    bool runs = w->runs;
    pthread_mutex_unlock(&g->queue_lock);
    if (runs) pthread_join(w->thread, NULL);
}

/* Of the handle: no function is called with it any more. */
EXPORT void shoal_free(group *g) { release_group(g); }

/* Finishes the calls that were made, but for receives; then the peers find that this rank has left. */
EXPORT void shoal_end(group *g) {
    if (getpid() != g->owner) return; /* a child that was forked has nothing to say here */
    while (atomic_load(&g->waiting_calls) > 0) {
        pthread_mutex_lock(&g->turn_lock);
        run(g, NULL, true);
        pthread_mutex_unlock(&g->turn_lock);
        ring_done(g);
    }
    while (sends_left(g)) wait_messages(g, NULL);
    pthread_mutex_lock(&g->queue_lock);
    atomic_store(&g->ending, true); /* no thread is started after this */
    pthread_mutex_unlock(&g->queue_lock);
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
}

/* Tests: another rank is told that this one has failed, as if it had. */
EXPORT void shoal_break(group *g, int fault, int culprit) {
    if (!join_users(g)) return;
    fail_group(g, fault, culprit);
    part_users(g);
}
