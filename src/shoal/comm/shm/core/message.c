/* Messages between two ranks: a stream in a ring of the sender's, which goes on whatever the collectives do.

   A message is a line (tag, bytes, dtype) and its content, rounded up to lines. To one rank, messages go in the order
   of the calls. What arrives belongs to the first receive that asked for its source and tag; if there is none, but
   others are asked for, it is put aside, so that tags may be asked for in any order. While nothing is asked for it
   stays in the ring, and a sender of more than the ring holds waits.

   All is done under `message_lock`, by whoever waits; by a thread where nobody does. */

#include "core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define STRIDE (128 << 10) /* published at once, so that both sides copy at the same time */

static uint64_t lines(uint64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }
static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void append(queue *q, op *message) {
    message->next = NULL;
    *q->end = message;
    q->end = &message->next;
}

static void take_out(queue *q, op *message) {
    op **at = &q->first;
    while (*at != message) at = &(*at)->next;
    *at = message->next;
    if (q->end == &message->next) q->end = at;
}

static void over(op *message, int fault, int culprit) {
    atomic_fetch_sub(&message->group->waiting_messages, 1);
    if (fault == NO_FAULT) finish(message, DONE);
    else fail(message, fault, culprit);
    ring_messages(message->group, message->group->rank);
    shoal_drop(message);
}

/* Content is moved in whole lines but for the last; `at` is a multiple of a line. */
static void ring_copy(const group *g, char *ring, uint64_t at, char *memory, uint64_t bytes, bool in) {
    uint64_t offset = at % g->settings.ring_bytes, first = least(bytes, g->settings.ring_bytes - offset);
    char *parts[] = {ring + offset, ring};
    uint64_t sizes[] = {first, bytes - first};
    for (int i = 0; i < 2; memory += sizes[i++]) {
        if (sizes[i] == 0) continue;
        if (in) memcpy(parts[i], memory, sizes[i]);
        else memcpy(memory, parts[i], sizes[i]);
    }
}

static uint64_t ring_space(const group *g, int to) {
    channel *c = channel_of(g, g->rank, to);
    uint64_t head = atomic_load_explicit(&c->head.value, memory_order_relaxed);
    return g->settings.ring_bytes - (head - atomic_load_explicit(&c->tail.value, memory_order_acquire));
}

/* `moved` counts the header line too. True: something went. */
static bool send_some(op *message) {
    group *g = message->group;
    int to = message->peer;
    channel *c = channel_of(g, g->rank, to);
    char *ring = ring_of(g, g->rank, to);
    uint64_t head = atomic_load_explicit(&c->head.value, memory_order_relaxed);
    uint64_t space = ring_space(g, to);
    if (space == 0) return false;
    if (message->moved == 0) {
        char line[LINE] = {0};
        memcpy(line, &message->tag, 8), memcpy(line + 8, &message->send_bytes[0], 8);
        memcpy(line + 16, &message->what.dtype, 4);
        ring_copy(g, ring, head, line, LINE, true);
        message->moved = LINE, head += LINE, space -= LINE;
    }
    uint64_t done = message->moved - LINE, bytes = least(message->send_bytes[0] - done, least(space, STRIDE));
    ring_copy(g, ring, head, message->send[0] + done, bytes, true);
    message->moved += bytes;
    atomic_store(&c->head.value, head + lines(bytes));
    ring_messages(g, to);
    return true;
}

static bool send_all(group *g, int to) {
    queue *q = &g->outgoing[to];
    bool went = false;
    while (q->first != NULL) {
        op *message = q->first;
        if (!send_some(message)) break;
        went = true;
        if (message->moved < LINE + message->send_bytes[0]) continue;
        take_out(q, message);
        over(message, NO_FAULT, 0);
    }
    return went;
}

static bool matches(const op *asked, int source, int64_t tag) {
    return (asked->peer == source || asked->peer == ANY_SOURCE) && asked->tag == tag;
}

static op *asked_for(group *g, int source, int64_t tag) {
    for (op *asked = g->asked.first; asked != NULL; asked = asked->next)
        if (matches(asked, source, tag)) return asked;
    return NULL;
}

/* The receive gets this message; one of another size or dtype fails, and so does the group: its content has no place
   to go. BYTES stand for any dtype. */
static bool claim(op *asked, int source, uint64_t bytes, uint32_t dtype) {
    take_out(&asked->group->asked, asked);
    asked->peer = source;
    asked->theirs = (signature){.kind = SEND, .dtype = dtype, .bytes = bytes};
    int fault = asked->receive_bytes[0] != bytes ? WRONG_SIZE : NO_FAULT;
    if (dtype != asked->what.dtype && dtype != BYTES && asked->what.dtype != BYTES) fault = DISAGREE;
    if (fault != NO_FAULT) over(asked, fault, source);
    return fault == NO_FAULT;
}

static stray *put_aside(group *g, int source, const incoming *in) {
    stray *s = calloc(1, sizeof *s), **end = &g->strays;
    if (s == NULL || (s->data = malloc(in->bytes + 1)) == NULL) {
        free(s);
        fail_group(g, NO_MEMORY, g->rank);
        return NULL;
    }
    s->source = source, s->tag = in->tag, s->bytes = in->bytes, s->dtype = in->dtype;
    while (*end != NULL) end = &(*end)->next;
    return *end = s;
}

/* Reads the next header, if somebody asks for messages from there. */
static bool begin_incoming(group *g, int from, uint64_t tail, uint64_t there) {
    incoming *in = &g->incoming[from];
    bool wanted = false;
    for (op *asked = g->asked.first; asked != NULL; asked = asked->next)
        wanted |= asked->peer == from || asked->peer == ANY_SOURCE;
    if (!wanted || there < LINE) return false;
    char line[LINE];
    ring_copy(g, ring_of(g, from, g->rank), tail, line, LINE, false);
    *in = (incoming){.active = true};
    memcpy(&in->tag, line, 8), memcpy(&in->bytes, line + 8, 8), memcpy(&in->dtype, line + 16, 4);
    in->target = asked_for(g, from, in->tag);
    bool placed = in->target != NULL ? claim(in->target, from, in->bytes, in->dtype)
                                     : (in->stray = put_aside(g, from, in)) != NULL;
    if (!placed) *in = (incoming){0};
    return placed;
}

static void end_incoming(incoming *in) {
    if (in->target != NULL) over(in->target, NO_FAULT, 0);
    if (in->stray != NULL) in->stray->whole = true;
    *in = (incoming){0};
}

static bool receive_all(group *g, int from) {
    channel *c = channel_of(g, from, g->rank);
    incoming *in = &g->incoming[from];
    bool went = false;
    for (;;) {
        uint64_t tail = atomic_load_explicit(&c->tail.value, memory_order_relaxed);
        uint64_t there = atomic_load_explicit(&c->head.value, memory_order_acquire) - tail, line = 0;
        if (!in->active) {
            if (!begin_incoming(g, from, tail, there)) return went;
            line = LINE;
        }
        uint64_t bytes = least(in->bytes - in->moved, least(there - line, STRIDE));
        char *to = (in->target != NULL ? in->target->receive[0] : in->stray->data) + in->moved;
        ring_copy(g, ring_of(g, from, g->rank), tail + line, to, bytes, false);
        in->moved += bytes;
        if (line + bytes > 0) {
            atomic_store(&c->tail.value, tail + line + lines(bytes));
            ring_messages(g, from);
            went = true;
        }
        if (in->moved == in->bytes) end_incoming(in);
        else if (bytes == 0) return went;
    }
}

/* Messages that were put aside and are whole by now go to those who asked for them. */
static void hand_over(group *g) {
    for (stray **at = &g->strays; *at != NULL;) {
        stray *s = *at;
        if (s->claimed == NULL || !s->whole) {
            at = &s->next;
            continue;
        }
        memcpy(s->claimed->receive[0], s->data, s->bytes);
        over(s->claimed, NO_FAULT, 0);
        *at = s->next;
        free(s->data);
        free(s);
    }
}

bool progress_messages(group *g) {
    bool went = false;
    for (int rank = 0; rank < g->size && g->failure == 0; rank++) {
        if (rank == g->rank) continue;
        went |= send_all(g, rank);
        went |= receive_all(g, rank);
    }
    hand_over(g);
    return went;
}

/* Why a message is refused. One to a rank that has failed would lie in the ring for nobody; what has come can still be
   received. */
static int refusal(const op *message, int *culprit) {
    group *g = message->group;
    int fault = group_fault(g, culprit);
    if (fault != NO_FAULT || message->what.kind == RECV) return fault;
    bool failed = atomic_load(&g->peers[message->peer]->life.value) == FAILED;
    return failed ? peer_fault(g, message->peer, culprit) : NO_FAULT;
}

void post_message(op *message) {
    group *g = message->group;
    int culprit, fault = refusal(message, &culprit);
    atomic_fetch_add(&g->waiting_messages, 1);
    if (fault != NO_FAULT) {
        over(message, fault, culprit);
        return;
    }
    if (message->what.kind == SEND) {
        append(&g->outgoing[message->peer], message);
        send_all(g, message->peer);
        return;
    }
    append(&g->asked, message);
    for (stray *s = g->strays; s != NULL; s = s->next) {
        if (s->claimed != NULL || !matches(message, s->source, s->tag)) continue;
        if (claim(message, s->source, s->bytes, s->dtype)) s->claimed = message;
        hand_over(g);
        return;
    }
    if (message->peer != ANY_SOURCE) receive_all(g, message->peer);
    else progress_messages(g);
}

/* Fails the group if the peer of `message` is gone, or it is late. */
static void judge(const op *message, const int *faults, const int *culprits) {
    if (message == NULL || message->group->failure != 0) return;
    int fault = message->peer == ANY_SOURCE ? NO_FAULT : faults[message->peer];
    if (fault != NO_FAULT) fail_group(message->group, fault, culprits[message->peer]);
    else if (now_s() > atomic_load(&message->deadline_s)) fail_group(message->group, TIMED_OUT, message->peer);
}

/* Of who waits for a message, or for its going out; those who only asked for it may take their time. */
void set_deadline(op *message) {
    double never = INFINITY;
    atomic_compare_exchange_strong(&message->deadline_s, &never, now_s() + message->group->settings.timeout_s);
}

/* Whether all that is asked for fits in the ring, so that it can come without our help. */
bool fits_ring(const group *g) {
    uint64_t bytes = 0;
    for (int rank = 0; rank < g->size; rank++)
        if (g->incoming[rank].active) bytes += g->incoming[rank].bytes - g->incoming[rank].moved;
    for (const op *asked = g->asked.first; asked != NULL; asked = asked->next) bytes += LINE + asked->receive_bytes[0];
    return bytes <= g->settings.ring_bytes / 2;
}

/* Whether only what fits in the rings is still to come. */
bool messages_rest(group *g) {
    pthread_mutex_lock(&g->message_lock);
    bool rest = fits_ring(g);
    for (int rank = 0; rank < g->size; rank++) rest &= g->outgoing[rank].first == NULL;
    pthread_mutex_unlock(&g->message_lock);
    return rest;
}

/* What nobody asks for may lie before what is asked for, and fill the ring: who it is for has to make room. */
void ring_receivers(group *g) {
    double now = now_s();
    pthread_mutex_lock(&g->message_lock);
    bool due = now - g->rung_s > 1e-9 * PATIENCE_NS;
    if (due) g->rung_s = now;
    for (int rank = 0; due && rank < g->size; rank++)
        if (g->outgoing[rank].first != NULL && ring_space(g, rank) == 0) ring(&g->peers[rank]->messenger);
    pthread_mutex_unlock(&g->message_lock);
}

/* Called when a slice of time has brought nothing. What a peer sent before it went is still received. */
void check_messages(group *g) {
    int faults[g->size], culprits[g->size];
    for (int rank = 0; rank < g->size; rank++)
        faults[rank] = rank == g->rank ? NO_FAULT : peer_fault(g, rank, &culprits[rank]);
    progress_messages(g);
    for (int rank = 0; rank < g->size; rank++) {
        for (op *send = g->outgoing[rank].first; send != NULL; send = send->next) judge(send, faults, culprits);
        judge(g->incoming[rank].target, faults, culprits);
    }
    for (op *asked = g->asked.first; asked != NULL; asked = asked->next) judge(asked, faults, culprits);
    for (stray *s = g->strays; s != NULL; s = s->next) judge(s->claimed, faults, culprits);
    if (g->failure != 0) drop_messages(g);
}

/* Everything that is under way fails with the group's fault. */
void drop_messages(group *g) {
    int culprit, fault = group_fault(g, &culprit);
    for (int rank = 0; rank < g->size; rank++) {
        for (op *m; (m = g->outgoing[rank].first) != NULL;) take_out(&g->outgoing[rank], m), over(m, fault, culprit);
        if (g->incoming[rank].target != NULL) over(g->incoming[rank].target, fault, culprit);
        g->incoming[rank] = (incoming){0};
    }
    for (op *m; (m = g->asked.first) != NULL;) take_out(&g->asked, m), over(m, fault, culprit);
    for (stray *s; (s = g->strays) != NULL;) {
        if (s->claimed != NULL) over(s->claimed, fault, culprit);
        g->strays = s->next;
        free(s->data);
        free(s);
    }
}
