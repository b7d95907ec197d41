/* Collectives as three stages that run in turns: bring, reduce, take.

       all-reduce, large   bring the others' parts | reduce my part | take the others' parts       (two shots)
       all-reduce, small   bring all               | everybody reduces all of it                   (one shot)
       reduce              as above; only the root takes, or reduces
       reduce-scatter      bring a block for each  | reduce mine into the output
       all-gather, broadcast, gather, barrier: bring all, or only the root does      | take, or only the root does
       all-to-all, scatter: bring a block for each, or only the root does            | take

   In a window, which all ranks have mapped, nothing is brought but the signature, and nothing taken:

       all-reduce      -  | reduce my part of all ranks' memory, and write it there
       reduce-scatter  -  | reduce my block of all ranks' memory into the output
       all-gather      -  | read the others' blocks in their memory

   Who brings nothing signs too. Ranks that wait for each other compare what they have called; where there is a root some
   need not wait, and of any two the one that comes later compares, with what the other has signed by then.

   A rank touches the others' memory after all have brought, and before it has reduced; a call is over when all have
   reduced. So a rank's memory is its own before a call and after it. Such a call takes one turn, whose place stays
   empty; those that follow each other need not wait for the end of the one before: `step_ahead`.

   (Two shots: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, section 4.5; memory for messages.)

   `step` goes on as far as it can without waiting: what is furthest in the pipeline goes first, while it is in the
   cache. Only the earliest stage that is blocked is waited for. Every wait is then for a stage of an earlier turn, or
   an earlier stage of the same turn, so that ranks cannot wait in a circle. */

#include "core.h"

#include <string.h>

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t pieces(uint64_t count, uint64_t chunk) { return count <= chunk ? 1 : (count + chunk - 1) / chunk; }

static bool is_reduction(const op *call) { return call->what.kind <= REDUCE_SCATTER; }
static bool in_two_stages(const op *call) { return is_reduction(call) || call->window != NULL; }
static bool has_root(const op *call) {
    uint32_t kind = call->what.kind;
    return kind == REDUCE || kind == BROADCAST || kind == GATHER || kind == SCATTER;
}
static bool has_blocks(const op *call) {
    return call->what.kind == REDUCE_SCATTER || call->what.kind == SCATTER || call->what.kind == ALL_TO_ALL;
}
static bool brings(const op *call, int rank) {
    bool root_only = call->what.kind == BROADCAST || call->what.kind == SCATTER;
    return !root_only || call->what.root == rank;
}
static bool is_receiver(const op *call, int rank) {
    return (call->what.kind != REDUCE && call->what.kind != GATHER) || call->what.root == rank;
}
static bool takes(const op *call, int rank) {
    if (call->window != NULL) return true;
    bool by_taking = !is_reduction(call) || (call->what.kind != REDUCE_SCATTER && !call->one_shot);
    return by_taking && is_receiver(call, rank);
}
static bool reduces(const op *call, int rank) {
    return is_reduction(call) && (!call->one_shot || is_receiver(call, rank));
}

/* Elements of a reduction, else bytes: how many there are, and where part `rank` of a piece begins. */
static uint64_t unit(const op *call) { return is_reduction(call) ? dtype_bytes(call->what.dtype) : 1; }

static uint64_t part_at(const op *call, uint64_t length, int rank) {
    uint64_t line = LINE / unit(call), size = (uint64_t)call->group->size;
    return smaller(length, (length * (uint64_t)rank / size + line - 1) / line * line);
}

/* Bytes [at, at + result) of block `bytes` go in this turn. */
static uint64_t bytes_in_turn(const op *call, uint64_t bytes, uint64_t index, uint64_t *at) {
    uint64_t chunk_bytes = call->chunk * unit(call);
    *at = smaller(bytes, index * chunk_bytes);
    return smaller(bytes - *at, chunk_bytes);
}

static void start(op *call) {
    group *g = call->group;
    uint64_t bytes = call->what.bytes, place = g->settings.place_bytes;
    uint64_t block = place / (uint64_t)g->size / LINE * LINE;
    bool may_be_one_shot = call->what.kind == ALL_REDUCE || call->what.kind == REDUCE;
    uint64_t small = smaller(g->settings.one_shot_bytes, place);
    call->one_shot = may_be_one_shot && call->window == NULL && bytes <= small;
    call->chunk = (has_blocks(call) ? block : place) / unit(call);
    call->turns = call->window != NULL ? 1 : pieces(bytes, call->chunk * unit(call));
    call->resolved = call->what.kind != ALL_TO_ALL;
    call->base = g->turn;
    call->started = true;
    if (call->window != NULL) g->turn += call->turns;
    if (call->what.kind == ALL_TO_ALL && call->send_bytes[g->rank] != call->receive_bytes[g->rank]) {
        call->theirs.bytes = call->send_bytes[g->rank];
        fail(call, WRONG_SIZE, g->rank);
    }
}

/* A rank that gives no mark says nothing about it. */
static bool alike(signature ours, signature theirs) {
    if (ours.mark == 0 || theirs.mark == 0) ours.mark = theirs.mark = 0;
    return memcmp(&ours, &theirs, sizeof ours) == 0;
}

static bool disagrees(op *call, int rank) {
    place_header *theirs = place_header_of(call->group, rank, call->base);
    call->theirs = theirs->signature;
    if (!alike(call->what, call->theirs)) return fail(call, DISAGREE, rank), true;
    if (call->what.kind != ALL_TO_ALL) return false;
    call->theirs.bytes = theirs->blocks[call->group->rank];
    return call->theirs.bytes != call->receive_bytes[rank] ? fail(call, WRONG_SIZE, rank), true : false;
}

static void sign(op *call) {
    place_header *mine = place_header_of(call->group, call->group->rank, call->base);
    mine->signature = call->what;
    if (call->what.kind != ALL_TO_ALL) return;
    mine->largest = 0;
    for (int rank = 0; rank < call->group->size; rank++) {
        mine->blocks[rank] = call->send_bytes[rank];
        if (mine->largest < call->send_bytes[rank]) mine->largest = call->send_bytes[rank];
    }
}

static void bring_blocks(op *call, uint64_t index) {
    group *g = call->group;
    char *place = place_of(g, g->rank, call->base + index);
    for (int rank = 0; rank < g->size; rank++) {
        uint64_t at, bytes = bytes_in_turn(call, call->send_bytes[rank], index, &at);
        if (bytes == 0) continue;
        bool mine = rank == g->rank;
        if (mine && is_reduction(call)) continue;
        char *to = mine ? call->receive[rank] + at : place + (uint64_t)rank * call->chunk * unit(call);
        memcpy(to, call->send[rank] + at, bytes);
    }
}

static void bring(op *call, uint64_t index) {
    group *g = call->group;
    if (index == 0) sign(call);
    if (call->window != NULL) return;
    if (has_blocks(call)) {
        bring_blocks(call, index);
        return;
    }
    uint64_t at, bytes = bytes_in_turn(call, call->what.bytes, index, &at), skip_from = bytes, skip_to = bytes;
    if (bytes == 0) return;
    if (call->turns == 1) ready_places(g, bytes);
    char *place = place_of(g, g->rank, call->base + index), *from = call->send[0] + at;
    if (is_reduction(call) && !call->one_shot) {
        skip_from = part_at(call, bytes / unit(call), g->rank) * unit(call);
        skip_to = part_at(call, bytes / unit(call), g->rank + 1) * unit(call);
    }
    memcpy(place, from, skip_from);
    memcpy(place + skip_to, from + skip_to, bytes - skip_to);
    bool keeps = !is_reduction(call) && call->what.kind != BARRIER && is_receiver(call, g->rank);
    if (keeps && call->receive[g->rank] != call->send[0]) memcpy(call->receive[g->rank] + at, from, bytes);
}

static void bring_nothing(op *call) {
    sign(call);
    call->cursors[BROUGHT] = call->turns;
    publish(call->group, BROUGHT, call->base + call->turns);
}

/* The sum of [from, from + bytes) of the piece, over all ranks, in rank order. */
static void reduce_part(op *call, uint64_t index, uint64_t at, uint64_t from, uint64_t bytes, bool share) {
    group *g = call->group;
    const char *in[g->size];
    bool blocks = call->what.kind == REDUCE_SCATTER;
    uint64_t in_place = blocks ? (uint64_t)g->rank * call->chunk * unit(call) : from;
    for (int rank = 0; rank < g->size; rank++)
        in[rank] = rank == g->rank ? (blocks ? call->send[rank] : call->send[0]) + at + from
                                   : place_of(g, rank, call->base + index) + in_place;
    char *mine = is_receiver(call, g->rank) ? call->receive[blocks ? 0 : g->rank] + at + from : NULL;
    char *const out[2] = {mine, share ? place_of(g, g->rank, call->base + index) + from : NULL};
    combine(call->what.dtype, call->what.reduction, in, g->size, bytes / unit(call), out, 2);
}

/* Byte `at` of the call in the memory of `rank`. */
static char *in_window(const op *call, int rank, uint64_t at) {
    return call->window->maps[rank] + call->what.offset + at;
}

static void gather_in_window(op *call) {
    for (int rank = 0; rank < call->group->size; rank++) {
        char *block = in_window(call, rank, call->what.bytes * (uint64_t)rank);
        if (rank != call->group->rank) memcpy(call->receive[rank], block, call->what.bytes);
    }
}

static void reduce_in_window(op *call) {
    group *g = call->group;
    uint64_t bytes = call->what.bytes, at = bytes * (uint64_t)g->rank;
    if (call->what.kind == ALL_REDUCE) {
        uint64_t length = bytes / unit(call), end = part_at(call, length, g->rank + 1) * unit(call);
        at = part_at(call, length, g->rank) * unit(call);
        bytes = end - at;
    }
    char *parts[g->size];
    for (int rank = 0; rank < g->size; rank++) parts[rank] = in_window(call, rank, at);
    bool scatters = call->what.kind == REDUCE_SCATTER;
    combine(call->what.dtype, call->what.reduction, (const char *const *)parts, g->size, bytes / unit(call),
            scatters ? call->receive : parts, scatters ? 1 : g->size);
}

static void reduce(op *call, uint64_t index) {
    uint64_t at, bytes = bytes_in_turn(call, call->what.bytes, index, &at), from = 0, to = bytes;
    bool share = call->what.kind != REDUCE_SCATTER && !call->one_shot;
    if (share) {
        from = part_at(call, bytes / unit(call), call->group->rank) * unit(call);
        to = part_at(call, bytes / unit(call), call->group->rank + 1) * unit(call);
    }
    if (to > from) reduce_part(call, index, at, from, to - from, share);
}

static void take_from(op *call, uint64_t index, int rank) {
    group *g = call->group;
    char *place = place_of(g, rank, call->base + index);
    uint64_t at, from = 0, bytes;
    if (call->what.kind == BARRIER) return;
    if (has_blocks(call)) {
        bytes = bytes_in_turn(call, call->receive_bytes[rank], index, &at);
        place += (uint64_t)g->rank * call->chunk * unit(call);
    } else {
        bytes = bytes_in_turn(call, call->what.bytes, index, &at);
    }
    if (is_reduction(call)) {
        uint64_t length = bytes / unit(call);
        from = part_at(call, length, rank) * unit(call);
        bytes = part_at(call, length, rank + 1) * unit(call) - from;
    }
    if (bytes > 0) memcpy(call->receive[rank] + at + from, place + from, bytes);
}

/* Whether all others, or those that bring something, have come so far; else whom to wait for. */
static bool all_reached(op *call, enum field field, uint64_t value, want *blocked) {
    group *g = call->group;
    for (int rank = 0; rank < g->size; rank++) {
        if (rank == g->rank || (field == BROUGHT && !brings(call, rank))) continue;
        if (reached(g, rank, field, value)) continue;
        *blocked = (want){rank, field, value};
        return false;
    }
    return true;
}

static void done_with(op *call, enum field field) {
    publish(call->group, field, call->base + ++call->cursors[field]);
}

/* On the first turn all ranks are asked what they think this call is. True: go on. */
static bool agreed(op *call, uint64_t index) {
    group *g = call->group;
    for (int rank = 0; index == 0 && rank < g->size; rank++)
        if (rank != g->rank && brings(call, rank) && disagrees(call, rank)) return false;
    return true;
}

/* Whether all that have come by now call the same. Each publishes, and then looks: one of any two sees the other. */
static bool agreed_so_far(op *call) {
    group *g = call->group;
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < g->size; rank++)
        if (rank != g->rank && reached(g, rank, BROUGHT, call->base + 1) && disagrees(call, rank)) return false;
    return true;
}

/* Who has called has shared its memory before: what is not here by then will not come. */
static bool mapped(op *call) {
    int missing;
    return is_mapped(call->window, &missing) ? true : (fail(call, UNSHARED, missing), false);
}

/* The number of turns of an all-to-all follows from the largest block that anybody sends. */
static bool resolve(op *call, want *blocked) {
    group *g = call->group;
    if (!all_reached(call, BROUGHT, call->base + 1, blocked) || !agreed(call, 0)) return false;
    uint64_t largest = 0;
    for (int rank = 0; rank < g->size; rank++) {
        uint64_t theirs = place_header_of(g, rank, call->base)->largest;
        largest = theirs > largest ? theirs : largest;
    }
    call->turns = pieces(largest, call->chunk);
    return call->resolved = true;
}

static bool try_take(op *call, want *blocked) {
    group *g = call->group;
    uint64_t index = call->cursors[TAKEN], turn = call->base + index + 1;
    if (in_two_stages(call)) {
        if (index == call->cursors[REDUCED]) return false;
        if (takes(call, g->rank) && !all_reached(call, REDUCED, turn, blocked)) return false;
    } else if (index >= call->cursors[BROUGHT] || (takes(call, g->rank) && !all_reached(call, BROUGHT, turn, blocked))) {
        return false;
    }
    if (takes(call, g->rank) && call->window == NULL) {
        if (!is_reduction(call) && !agreed(call, index)) return false;
        for (int rank = 0; rank < g->size; rank++)
            if (rank != g->rank && (is_reduction(call) || brings(call, rank))) take_from(call, index, rank);
    }
    done_with(call, TAKEN);
    return true;
}

static bool try_reduce(op *call, want *blocked) {
    uint64_t index = call->cursors[REDUCED];
    if (!in_two_stages(call) || index == call->cursors[BROUGHT]) return false;
    if (call->window != NULL || reduces(call, call->group->rank)) {
        if (!all_reached(call, BROUGHT, call->base + index + 1, blocked) || !agreed(call, index)) return false;
        if (call->window == NULL) reduce(call, index);
        else if (!mapped(call)) return false;
        else if (call->what.kind == ALL_GATHER) gather_in_window(call);
        else reduce_in_window(call);
    }
    done_with(call, REDUCED);
    return true;
}

static bool try_bring(op *call, want *blocked) {
    uint64_t index = call->cursors[BROUGHT], turn = call->base + index, places = call->group->settings.places;
    if (index == call->turns) return false;
    if (turn >= places && !all_reached(call, TAKEN, turn - places + 1, blocked)) return false;
    if (brings(call, call->group->rank)) bring(call, index), done_with(call, BROUGHT);
    else bring_nothing(call);
    return index > 0 || !has_root(call) || agreed_so_far(call);
}

bool step(op *call, want *blocked) {
    if (!call->started) start(call);
    if (call->fault != NO_FAULT) return true;
    while (call->cursors[TAKEN] < call->turns || !call->resolved) {
        want take = {0}, reduce = {0}, bring = {0}, more = {0};
        bool on = (call->cursors[BROUGHT] > 0 && !call->resolved) ? resolve(call, &more)
                : try_take(call, &take) || try_reduce(call, &reduce) || try_bring(call, &bring);
        if (call->fault != NO_FAULT) return true;
        if (on) continue;
        *blocked = more.value ? more : take.value ? take : reduce.value ? reduce : bring;
        return false;
    }
    if (call->window == NULL) call->group->turn += call->turns;
    finish(call, DONE);
    return true;
}

static bool overlap(const char *a, uint64_t a_bytes, const char *b, uint64_t b_bytes) {
    return a < b + b_bytes && b < a + a_bytes;
}

/* What a call in a window reads and writes there, as this rank's addresses. */
static const char *shared_at(const op *call, uint64_t *bytes) {
    *bytes = call->what.bytes * (call->what.kind == ALL_REDUCE ? 1 : (uint64_t)call->group->size);
    return in_window(call, call->group->rank, 0);
}

bool depends(const op *call, const op *before) {
    uint64_t ours, theirs;
    const char *shared = shared_at(call, &ours), *before_shared = shared_at(before, &theirs);
    if (overlap(shared, ours, before_shared, theirs)) return true;
    bool writes_elsewhere = call->what.kind == REDUCE_SCATTER, wrote_elsewhere = before->what.kind == REDUCE_SCATTER;
    return (wrote_elsewhere && overlap(shared, ours, before->receive[0], before->what.bytes)) ||
           (writes_elsewhere && overlap(before_shared, theirs, call->receive[0], call->what.bytes));
}

bool step_ahead(op *call, const op *before) {
    want blocked;
    if (!call->started) start(call);
    if (before->cursors[BROUGHT] == 0 || (call->cursors[BROUGHT] == 0 && !try_bring(call, &blocked))) return false;
    if (before->cursors[REDUCED] == 1) try_reduce(call, &blocked);
    return call->fault == NO_FAULT;
}
