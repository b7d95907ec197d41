/* Windows: memory that a group has allocated, which every rank has of every other in its own address space.

   (A window is what MPI-2 calls such memory, and NCCL too; OpenSHMEM speaks of symmetric memory.)

   Every rank makes memory of its own and sends its descriptor to all others, over the streams between them; it waits
   for nobody. A rank reads what the others have sent when it first needs it: in a call in that window, after all have
   called, so that it is there; and while it allocates more, so that streams do not fill up. Windows are numbered in
   the order of allocation, which is that of the group's calls: the same on all ranks.

   A window lives as long as its handle and its calls; whoever lets go of it unmaps it, its peers need not. */

#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define RETRY_NS 500000L

typedef struct {
    uint64_t number, bytes;
} notice;

typedef union {
    struct cmsghdr header;
    char room[CMSG_SPACE(sizeof(int))];
} ancillary;

static bool strike_out(window *w) {
    window **at = &w->group->windows;
    if (--w->references > 0) return false;
    while (*at != w) at = &(*at)->next;
    *at = w->next;
    return true;
}

void drop_window(window *w) {
    group *g = w->group;
    if (getpid() != g->owner) return; /* in a child that was forked a lock may be held for ever */
    pthread_mutex_lock(&g->queue_lock);
    bool last = strike_out(w);
    pthread_mutex_unlock(&g->queue_lock);
    if (!last) return;
    for (int rank = 0; rank < g->size; rank++)
        if (w->maps[rank] != NULL) munmap(w->maps[rank], w->bytes);
    free(w->maps);
    free(w);
    release_group(g);
}

window *window_of(group *g, const char *from, uint64_t bytes) {
    pthread_mutex_lock(&g->queue_lock);
    window *w = g->windows;
    for (; w != NULL; w = w->next) {
        const char *mine = w->maps[g->rank];
        if (from >= mine && from < mine + w->bytes && bytes <= w->bytes - (uint64_t)(from - mine)) break;
    }
    if (w != NULL) w->references++;
    pthread_mutex_unlock(&g->queue_lock);
    return w;
}

/* True: a descriptor was sent. False: `errno` says why not. */
static bool send_descriptor(int stream, notice what, int descriptor) {
    ancillary with = {0};
    struct iovec line = {&what, sizeof what};
    struct msghdr message = {.msg_iov = &line, .msg_iovlen = 1, .msg_control = &with, .msg_controllen = sizeof with};
    struct cmsghdr *first = CMSG_FIRSTHDR(&message);
    first->cmsg_level = SOL_SOCKET, first->cmsg_type = SCM_RIGHTS, first->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(first), &descriptor, sizeof descriptor);
    return sendmsg(stream, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof what;
}

/* The next descriptor that has come, for the caller to close; -1 where none has. */
static int receive_descriptor(int stream, notice *what) {
    ancillary with = {0};
    struct iovec line = {what, sizeof *what};
    struct msghdr message = {.msg_iov = &line, .msg_iovlen = 1, .msg_control = &with, .msg_controllen = sizeof with};
    if (recvmsg(stream, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *what) return -1;
    struct cmsghdr *first = CMSG_FIRSTHDR(&message);
    if (first == NULL || first->cmsg_type != SCM_RIGHTS || first->cmsg_len != CMSG_LEN(sizeof(int))) return -1;
    int descriptor;
    memcpy(&descriptor, CMSG_DATA(first), sizeof descriptor);
    return descriptor;
}

/* Memory of another size, or of a window that is let go of already, is not mapped. */
static void take_in(group *g, int rank, notice what, int descriptor) {
    pthread_mutex_lock(&g->queue_lock);
    window *w = g->windows;
    while (w != NULL && w->number != what.number) w = w->next;
    if (w != NULL && w->bytes == what.bytes) w->maps[rank] = shoal_map(descriptor, what.bytes);
    pthread_mutex_unlock(&g->queue_lock);
    close(descriptor);
}

/* Takes in what has come of windows that this rank has allocated too. Under `turn_lock`. */
static void collect(group *g) {
    pthread_mutex_lock(&g->queue_lock);
    uint64_t allocated = g->allocated;
    pthread_mutex_unlock(&g->queue_lock);
    for (int rank = 0; rank < g->size; rank++) {
        notice what = {0};
        int descriptor;
        while (rank != g->rank && g->arrived[rank] < allocated &&
               (descriptor = receive_descriptor(g->streams[rank], &what)) >= 0) {
            g->arrived[rank] = what.number;
            take_in(g, rank, what, descriptor);
        }
    }
}

bool is_mapped(window *w, int *missing) {
    for (int pass = 0; pass < 2; pass++) {
        *missing = 0;
        while (*missing < w->group->size && w->maps[*missing] != NULL) ++*missing;
        if (*missing == w->group->size) return true;
        if (pass == 0) collect(w->group);
    }
    return false;
}

/* A stream takes so many, and a user may have so many under way: then room is made for the peers', and waited. A rank
   that has left needs none; the next call finds out. */
static int give(group *g, int rank, notice what, int descriptor) {
    double until_s = now_s() + g->settings.timeout_s;
    while (!send_descriptor(g->streams[rank], what, descriptor)) {
        int culprit, error = errno;
        if (error == EPIPE || error == ECONNRESET || peer_fault(g, rank, &culprit) != NO_FAULT) return 0;
        if (error != EAGAIN && error != ETOOMANYREFS && error != EINTR) return error;
        if (now_s() > until_s) return ETIMEDOUT;
        if (pthread_mutex_trylock(&g->turn_lock) == 0) collect(g), pthread_mutex_unlock(&g->turn_lock);
        nanosleep(&(struct timespec){0, RETRY_NS}, NULL);
    }
    return 0;
}

static void enlist(group *g, window *w) {
    pthread_mutex_lock(&g->queue_lock);
    w->number = ++g->allocated;
    w->next = g->windows;
    g->windows = w;
    pthread_mutex_unlock(&g->queue_lock);
}

static window *new_window(group *g, int descriptor, uint64_t bytes) {
    window *w = calloc(1, sizeof *w);
    if (w == NULL || (w->maps = calloc((size_t)g->size, sizeof *w->maps)) == NULL) return free(w), NULL;
    w->group = g, w->bytes = bytes, w->references = 1;
    w->maps[g->rank] = shoal_map(descriptor, bytes);
    if (w->maps[g->rank] == NULL) return free(w->maps), free(w), NULL;
    atomic_fetch_add(&g->references, 1);
    return w;
}

/* Lets go of a window. Its memory is unmapped when no call is in it. */
EXPORT void shoal_release(window *w) { drop_window(w); }

/* Shares this rank's memory with the group, whose ranks all do so; the descriptor stays the caller's. NULL: `error`. */
EXPORT window *shoal_share(group *g, int descriptor, uint64_t bytes, int *error) {
    *error = ECHILD;
    if (getpid() != g->owner) return NULL;
    *error = ENOTCONN;
    if (!join_users(g)) return NULL;
    window *w = new_window(g, descriptor, bytes);
    *error = w == NULL ? ENOMEM : 0;
    if (w != NULL) enlist(g, w);
    for (int rank = 0; rank < g->size && *error == 0; rank++)
        if (rank != g->rank) *error = give(g, rank, (notice){w->number, bytes}, descriptor);
    if (w != NULL && *error != 0) drop_window(w), w = NULL;
    part_users(g);
    return w;
}

/* Where it lies in this rank's address space. */
EXPORT void *shoal_address(const window *w) { return w->maps[w->group->rank]; }

/* Where the memory of `rank` lies in this rank's address space, as far into it as `from` is into this rank's own; NULL:
   `from` is in no window, or not all ranks' are here. Not beside a call of the group. */
EXPORT void *shoal_peer(group *g, const char *from, uint64_t bytes, int rank) {
    if (getpid() != g->owner || !join_users(g)) return NULL;
    char *found = NULL;
    int missing;
    window *w = window_of(g, from, bytes);
    if (w != NULL) {
        pthread_mutex_lock(&g->turn_lock);
        if (is_mapped(w, &missing)) found = w->maps[rank] + (from - w->maps[g->rank]);
        pthread_mutex_unlock(&g->turn_lock);
        drop_window(w);
    }
    part_users(g);
    return found;
}
