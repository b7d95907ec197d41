/* Ranks as threads of one process, so that a sanitizer sees all of them: every collective, many in flight, messages
   with tags in any order, groups made and dropped, a rank that gives up in the middle. Exit code 0: all as defined. */

#define _GNU_SOURCE
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

void *shoal_map(int, uint64_t);
group *shoal_open(int, int, void *const *, const int *, const settings *);
op *shoal_start(group *, const signature *, char *, char *, bool);
op *shoal_start_lists(group *, const signature *, char *const *, const uint64_t *, char *const *, const uint64_t *, bool);
op *shoal_message(group *, int, int, char *, uint64_t, int, int64_t, bool);
int shoal_wait(op *, double, bool);
window *shoal_share(group *, int, uint64_t, int *);
void *shoal_address(const window *);
void shoal_release(window *);
void shoal_end(group *);
void shoal_free(group *);
void shoal_break(group *, int, int);

enum { MOST = 4, FLIGHT = 12, LONGEST = 5000 };

typedef struct {
    int rank, size, seed, memory[MOST], streams[MOST][MOST], failures;
    settings settings;
    pthread_barrier_t *meet;
} place;

#define EXPECT(what, ...)                                                                                              \
    do {                                                                                                               \
        if (!(what)) p->failures++, fprintf(stderr, __VA_ARGS__), fputc('\n', stderr);                                 \
    } while (0)

static uint32_t drawn(uint32_t *state) { return *state = *state * 1664525u + 1013904223u, *state >> 8; }

static int outcome(op *call) {
    int result;
    while ((result = shoal_wait(call, 0.1, true)) == PENDING) {}
    shoal_drop(call);
    return result;
}

static group *joined(place *p) {
    void *segments[MOST];
    for (int q = 0; q < p->size; q++) segments[q] = shoal_map(p->memory[q], shoal_segment_bytes(p->size, &p->settings));
    return shoal_open(p->rank, p->size, segments, p->streams[p->rank], &p->settings);
}

static void all_reduces(place *p, group *g) {
    uint32_t state = (uint32_t)p->seed, total = (uint32_t)(p->size * (p->size + 1) / 2);
    int32_t *data[FLIGHT];
    op *calls[FLIGHT];
    uint64_t counts[FLIGHT];
    for (int i = 0; i < FLIGHT; i++) {
        counts[i] = drawn(&state) % LONGEST;
        data[i] = malloc(4 * counts[i] + 1);
        for (uint64_t j = 0; j < counts[i]; j++) data[i][j] = (p->rank + 1) * (int32_t)(j % 97 + 1);
        signature what = {.kind = ALL_REDUCE, .dtype = I32, .reduction = SUM, .bytes = 4 * counts[i]};
        calls[i] = shoal_start(g, &what, (char *)data[i], (char *)data[i], i % 3 == 0);
    }
    for (int i = FLIGHT - 1; i >= 0; i--) {
        EXPECT(outcome(calls[i]) == DONE, "all-reduce failed");
        uint64_t wrong = 0;
        for (uint64_t j = 0; j < counts[i]; j++) wrong += data[i][j] != (int32_t)(total * (j % 97 + 1));
        EXPECT(wrong == 0, "all-reduce %d: %lu of %lu", i, wrong, counts[i]);
        free(data[i]);
    }
}

/* In memory that all ranks have mapped: two calls under way in each of several windows, some let go of unused, or
   before their calls are over. */
static void in_windows(place *p, group *g) {
    enum { WINDOWS = 4, COUNT = 6000 };
    int32_t total = p->size * (p->size + 1) / 2;
    window *windows[WINDOWS];
    op *calls[WINDOWS][2];
    for (int i = 0; i < WINDOWS; i++) {
        int memory = memfd_create("window", MFD_CLOEXEC), error;
        if (ftruncate(memory, 4 * COUNT * p->size) != 0) p->failures++;
        windows[i] = shoal_share(g, memory, (uint64_t)(4 * COUNT * p->size), &error);
        EXPECT(windows[i] != NULL, "a window: error %d", error);
        close(memory);
        if (windows[i] == NULL || i == 1) continue;
        int32_t *data = shoal_address(windows[i]);
        for (int j = 0; j < COUNT; j++) data[j] = (p->rank + 1) * (j % 97);
        signature half = {.kind = ALL_REDUCE, .dtype = I32, .reduction = SUM, .bytes = 4 * COUNT / 2};
        for (int k = 0; k < 2; k++) {
            char *at = (char *)(data + k * COUNT / 2);
            calls[i][k] = shoal_start(g, &half, at, at, (i + k) % 3 == 0);
        }
    }
    if (windows[1] != NULL) shoal_release(windows[1]);
    for (int i = WINDOWS - 1; i >= 0; i--) {
        if (windows[i] == NULL || i == 1) continue;
        int32_t *data = shoal_address(windows[i]);
        for (int k = 1; k >= 0; k--) EXPECT(outcome(calls[i][k]) == DONE, "all-reduce in a window failed");
        uint64_t wrong = 0;
        for (int j = 0; j < COUNT; j++) wrong += data[j] != total * (j % 97);
        EXPECT(wrong == 0, "all-reduce in window %d: %lu wrong", i, wrong);
        int32_t *mine = data + COUNT * p->rank;
        for (int j = 0; j < COUNT * p->size; j++) data[j] = j / COUNT + 1;
        signature block = {.kind = REDUCE_SCATTER, .dtype = I32, .reduction = SUM, .bytes = 4 * COUNT};
        op *call = shoal_start(g, &block, (char *)data, (char *)mine, i == 0);
        EXPECT(outcome(call) == DONE && mine[COUNT - 1] == p->size * (p->rank + 1), "reduce-scatter in a window");
        block.kind = ALL_GATHER, block.dtype = BYTES, block.reduction = 0;
        call = shoal_start(g, &block, (char *)mine, (char *)data, i == 0);
        if (i == 3) shoal_release(windows[i]);
        EXPECT(outcome(call) == DONE, "all-gather in a window failed");
        for (int q = 0; q < p->size && i != 3; q++)
            EXPECT(data[q * COUNT] == p->size * (q + 1), "block %d of an all-gather in a window", q);
        if (i != 3) shoal_release(windows[i]);
    }
}

static void moves(place *p, group *g) {
    uint32_t state = (uint32_t)p->seed + 7;
    for (int i = 0; i < FLIGHT; i++) {
        uint64_t bytes = drawn(&state) % LONGEST, n = (uint64_t)p->size;
        int root = (int)(drawn(&state) % n);
        char *own = malloc(n * bytes + 1), *all = malloc(n * bytes + 1);
        memset(own, p->rank + 1, n * bytes), memset(all, 0, n * bytes);
        int kind = (int[]){ALL_GATHER, ALL_TO_ALL, BROADCAST, BARRIER}[i % 4];
        signature what = {.kind = (uint32_t)kind, .dtype = BYTES, .root = kind == BROADCAST ? root : 0,
                          .bytes = kind == BARRIER ? 0 : bytes};
        EXPECT(outcome(shoal_start(g, &what, own, kind == BROADCAST ? own : all, i % 2)) == DONE, "move failed");
        for (uint64_t q = 0; q < n && bytes > 0; q++) {
            if (kind <= ALL_GATHER || kind == ALL_TO_ALL) EXPECT(all[q * bytes] == (char)(q + 1), "block of %lu", q);
            if (kind == BROADCAST) EXPECT(own[bytes - 1] == root + 1, "broadcast");
        }
        free(own), free(all);
    }
}

static void reduce_scatters(place *p, group *g) {
    for (uint64_t count = 1; count < LONGEST; count = count * 3 + 1) {
        float *in = malloc(4 * count * (uint64_t)p->size), *out = malloc(4 * count);
        for (uint64_t j = 0; j < count * (uint64_t)p->size; j++) in[j] = (float)(j / count + 1);
        signature what = {.kind = REDUCE_SCATTER, .dtype = F32, .reduction = SUM, .bytes = 4 * count};
        EXPECT(outcome(shoal_start(g, &what, (char *)in, (char *)out, false)) == DONE, "reduce-scatter failed");
        EXPECT(out[count - 1] == (float)(p->size * (p->rank + 1)), "reduce-scatter of %lu", count);
        free(in), free(out);
    }
}

/* To each other rank three messages, asked for in the opposite order of their tags. */
static void messages(place *p, group *g) {
    enum { TAGS = 3, BYTES_EACH = 30000 };
    op *calls[2 * TAGS * MOST];
    char *data[2 * TAGS * MOST];
    int n = 0;
    for (int q = 0; q < p->size; q++)
        for (int tag = 0; q != p->rank && tag < TAGS; tag++, n++) {
            data[n] = malloc(BYTES_EACH);
            memset(data[n], p->rank * 10 + tag, BYTES_EACH);
            calls[n] = shoal_message(g, SEND, BYTES, data[n], BYTES_EACH, q, tag, false);
        }
    int sends = n;
    for (int q = 0; q < p->size; q++)
        for (int tag = TAGS - 1; q != p->rank && tag >= 0; tag--, n++) {
            data[n] = malloc(BYTES_EACH);
            calls[n] = shoal_message(g, RECV, BYTES, data[n], BYTES_EACH, q, tag, false);
        }
    int at = sends;
    for (int q = 0; q < p->size; q++)
        for (int tag = TAGS - 1; q != p->rank && tag >= 0; tag--, at++) {
            EXPECT(outcome(calls[at]) == DONE, "message failed");
            EXPECT(data[at][0] == q * 10 + tag && data[at][BYTES_EACH - 1] == q * 10 + tag, "message %d of %d", tag, q);
        }
    for (int i = 0; i < sends; i++) EXPECT(outcome(calls[i]) == DONE, "send failed");
    for (int i = 0; i < n; i++) free(data[i]);
}

static void breaks(place *p, group *g) {
    enum { COUNT = 50000 };
    int32_t *data = calloc(COUNT, 4);
    char byte = 0;
    signature what = {.kind = ALL_REDUCE, .dtype = I32, .reduction = SUM, .bytes = 4 * COUNT};
    op *message = p->rank == 0 ? shoal_message(g, RECV, BYTES, &byte, 1, 1, 5, false) : NULL;
    if (p->rank == 1) shoal_break(g, TIMED_OUT, 1);
    EXPECT(outcome(shoal_start(g, &what, (char *)data, (char *)data, false)) == BROKEN, "a broken group went on");
    if (message != NULL) EXPECT(outcome(message) == BROKEN, "a message in a broken group");
    free(data);
}

static void *life(void *argument) {
    place *p = argument;
    group *g = joined(p);
    all_reduces(p, g);
    moves(p, g);
    in_windows(p, g);
    messages(p, g);
    reduce_scatters(p, g);
    all_reduces(p, g);
    pthread_barrier_wait(p->meet);
    if (p->seed % 2) breaks(p, g);
    shoal_end(g);
    shoal_free(g);
    return NULL;
}

static int round_of(int size, int seed, const settings *chosen) {
    place places[MOST] = {0};
    pthread_t threads[MOST];
    pthread_barrier_t meet;
    int memory[MOST], failures = 0;
    pthread_barrier_init(&meet, NULL, (unsigned)size);
    for (int r = 0; r < size; r++) {
        memory[r] = memfd_create("stress", MFD_CLOEXEC);
        if (ftruncate(memory[r], (off_t)shoal_segment_bytes(size, chosen)) != 0) return 1;
    }
    int streams[MOST][MOST];
    memset(streams, -1, sizeof streams);
    for (int a = 0; a < size; a++)
        for (int b = a + 1; b < size; b++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) return 1;
            streams[a][b] = pair[0], streams[b][a] = pair[1];
        }
    for (int r = 0; r < size; r++) {
        places[r] = (place){.rank = r, .size = size, .seed = seed, .settings = *chosen, .meet = &meet};
        memcpy(places[r].memory, memory, sizeof memory), memcpy(places[r].streams, streams, sizeof streams);
        pthread_create(&threads[r], NULL, life, &places[r]);
    }
    for (int r = 0; r < size; r++) pthread_join(threads[r], NULL), failures += places[r].failures, close(memory[r]);
    pthread_barrier_destroy(&meet);
    return failures;
}

int main(int count, char **arguments) {
    int rounds = count > 1 ? atoi(arguments[1]) : 20, failures = 0;
    settings small = {.places = 3, .place_bytes = 1024, .ring_bytes = 4096, .one_shot_bytes = 512, .timeout_s = 20};
    settings large = {.places = 4, .place_bytes = 16384, .ring_bytes = 65536, .one_shot_bytes = 4096, .spins = 200, .spare_core = true, .timeout_s = 20};
    for (int i = 0; i < rounds; i++) failures += round_of(1 + i % MOST, i, i / MOST % 2 ? &large : &small);
    printf("%d rounds, %d failures\n", rounds, failures);
    return failures != 0;
}
