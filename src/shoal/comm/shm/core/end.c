/* A group's end. */

#include "core.h"

#include <unistd.h>

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
