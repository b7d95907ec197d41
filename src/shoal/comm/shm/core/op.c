/* A call: made, over in one way or another, and dropped by its two holders. */

#include "core.h"

#include <stdlib.h>
#include <unistd.h>

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
