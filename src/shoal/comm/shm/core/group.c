/* A group: its segments and descriptors, and who uses them. The last user leaves. */

#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

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
    g->shared_waits_borne = FEWEST_SHARED_WAITS;
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
