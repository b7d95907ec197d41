/* The shared-memory core: what its files share.

   Every rank owns one segment, which all ranks of the group map:

       header | a header per place | a channel per peer | places | rings

   Places carry collectives, rings carry messages between two ranks. A rank writes into its own segment only, but for
   the tails of the rings that it reads, and for the bells of others.

   Turns. A collective goes through in pieces; each piece takes the next turn, turn t uses place t % places. Turns are
   counted from the group's first call on, alike on all ranks, so that counters only grow. A rank publishes three:
   `brought` (its data lie in its place), `reduced` (its part of the sum does), `taken` (it has read all it wants of
   this turn, on all ranks). A place may be written again when all have taken what lay in it.

   All waiting is for one counter of one rank to reach one value. Who sleeps writes down which (`want`), so that it is
   woken once, by the right rank. Publishing a counter and reading `want`, and writing `want` and reading the counter,
   are sequentially consistent: one of the two sees the other.

   Windows. Memory that a group has allocated (`window.c`) is mapped by all of its ranks: collectives on it need no
   places, see `collective.c`. */

#ifndef SHOAL_CORE_H
#define SHOAL_CORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LINE 64
#define SLICE_NS 100000000L  /* how often one who sleeps looks whether its peer still lives */
#define LOOK_NS 100000L      /* how long a caller that has nothing else to do looks before it sleeps */
#define FEWEST_SHARED_WAITS 3 /* in a row for ranks of the own core, before a rank asks for another */
#define PATIENCE_NS 2000000L /* how long before it rings the thread of a peer whose calls or receives rest */

enum dtype { F32, F64, BF16, F16, I8, U8, I16, I32, I64, BOOL, BYTES };
enum reduction { SUM, AVG, MAX, MIN, PROD };
enum kind { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, GATHER, SCATTER, ALL_TO_ALL, BARRIER, SEND, RECV };
enum field { BROUGHT, REDUCED, TAKEN, FIELDS };
enum life { ALIVE, LEFT, FAILED };
enum outcome { PENDING, DONE, BROKEN, FOREIGN };
enum fault {
    NO_FAULT, PEER_DEAD, PEER_LEFT, PEER_FAILED, TIMED_OUT, DISAGREE, WRONG_SIZE, CLOSED, NO_MEMORY, UNSHARED, EARLIER
};

#define ANY_SOURCE (-1)
#define EXPORT __attribute__((visibility("default"))) /* all else is hidden: libc has a `step`, too */

typedef struct {
    _Alignas(LINE) _Atomic uint32_t value;
} word;

typedef struct {
    _Alignas(LINE) _Atomic uint64_t value;
} counter;

typedef struct { /* what a call is, as far as its ranks must agree */
    uint32_t kind, dtype, reduction;
    int32_t root;
    uint64_t bytes;
    uint64_t mark; /* the caller's own: whatever else has to be alike; 0: nothing */
    uint64_t window, offset; /* of a call in memory that all ranks have mapped: which (else 0), and where in it */
} signature;

typedef struct {
    _Alignas(LINE) signature signature;
    uint64_t largest;  /* of ALL_TO_ALL: the largest block that this rank sends */
    uint64_t blocks[]; /* of what is sent in blocks: bytes for each rank */
} place_header;

typedef struct {
    counter head; /* bytes ever written, by the sender */
    counter tail; /* bytes ever read, by the receiver */
} channel;

typedef struct {
    word life; /* enum life; of a rank that FAILED, `culprit` says because of whom */
    _Atomic int32_t culprit;
    _Atomic int32_t core; /* from which it last called a collective, and 1; 0: not known */
    counter fields[FIELDS];
    word bell;    /* of collectives */
    counter want; /* 0: awake; else packed by `packed_want` */
    word message_bell;
    word message_sleepers;
    word helper;    /* bell of the thread that goes on with collectives */
    word messenger; /* the same of messages */
    word resting; /* calls that this rank has made and left to whoever waits */
} header;

typedef struct {
    uint32_t places;
    uint64_t place_bytes, ring_bytes, one_shot_bytes;
    uint32_t spins;
    bool spare_core; /* a thread may go on with calls while the caller computes */
    double timeout_s;
} settings;

typedef struct group group;

typedef struct window { /* memory of one allocation: every rank's own, mapped by all */
    struct window *next;
    group *group;
    int references; /* the handle's and the calls'; under `queue_lock` */
    uint64_t number, bytes; /* numbered from 1, alike on all ranks */
    char **maps;            /* by rank; NULL until it has come */
} window;

typedef struct op {
    struct op *next;
    group *group;
    _Atomic int outcome, references;
    signature what;
    _Atomic double deadline_s; /* of a message: infinite until somebody waits for it */
    int fault, culprit;
    signature theirs;
    /* collectives */
    window *window; /* that it is carried out in; NULL: in places */
    bool rests, started, one_shot, resolved;
    uint64_t base, turns, chunk;
    uint64_t cursors[FIELDS];
    /* messages */
    int peer;
    int64_t tag;
    uint64_t moved;
    /* both: by rank */
    char **send, **receive;
    uint64_t *send_bytes, *receive_bytes;
} op;

typedef struct stray { /* a message that came before it was asked for */
    struct stray *next;
    int source;
    uint32_t dtype;
    int64_t tag;
    uint64_t bytes;
    bool whole;
    op *claimed;
    char *data;
} stray;

typedef struct { /* what is on its way from one rank */
    bool active;
    uint32_t dtype;
    int64_t tag;
    uint64_t bytes, moved;
    op *target;
    stray *stray;
} incoming;

typedef struct {
    op *first, **end;
} queue;

typedef struct {
    pthread_t thread;
    bool runs;
    word *bell;
    _Atomic int callers; /* who wait and do the work themselves */
} worker;

struct group {
    int rank, size, owner;
    settings settings;
    header **peers; /* the segments, by rank */
    uint64_t segment_bytes;
    int *streams, *processes; /* descriptors by rank; -1 where there is none */
    _Atomic int references; /* the handle's and the calls': of this struct */
    _Atomic int users;      /* the handle, threads, those who wait: of the segments; none can join when it is 0 */
    _Atomic bool ending;
    /* collectives: `queue_lock` for the list, `turn_lock` for whoever runs it */
    pthread_mutex_t queue_lock, turn_lock;
    queue calls;
    _Atomic int waiting_calls;
    uint64_t turn;
    uint64_t ready_bytes; /* of each of this rank's places: they have memory */
    uint64_t *seen[FIELDS];
    _Atomic uint32_t failure; /* the first; see `group_fault` */
    window *windows;    /* under `queue_lock` */
    uint64_t allocated; /* windows so far, likewise */
    uint64_t *arrived;  /* by rank: the number of the last one that has come; under `turn_lock` */
    word done_bell;     /* rings when a call is over or `turn_lock` is free */
    _Atomic int done_sleepers;
    int shared_waits, shared_waits_borne; /* in a row: `cores.c`; under `turn_lock` */
    double judged_s; /* when somebody who polls last looked whether a peer still lives; under `turn_lock` */
    worker collective_worker;
    /* messages: `message_lock` for all of it */
    pthread_mutex_t message_lock;
    queue *outgoing; /* by destination */
    queue asked;     /* receives that nothing has come for, in order */
    incoming *incoming;
    stray *strays;
    _Atomic int waiting_messages;
    double checked_s, rung_s; /* when the peers were last looked after, and rung for room */
    worker message_worker;
};

/* segment.c */
void *shoal_map(int descriptor, uint64_t bytes);
uint64_t shoal_segment_bytes(int size, const settings *chosen);
place_header *place_header_of(const group *g, int rank, uint64_t turn);
char *place_of(const group *g, int rank, uint64_t turn);
void ready_places(group *g, uint64_t bytes); /* under `turn_lock` */
channel *channel_of(const group *g, int from, int to);
char *ring_of(const group *g, int from, int to);

/* combine.c: each of `outs` outputs (may be null) becomes the reduction of n tensors, from left to right */
void combine(enum dtype dtype, enum reduction reduction, const char *const *in, int n, uint64_t count, char *const *out,
             int outs);
uint64_t dtype_bytes(enum dtype dtype);

/* wait.c */
typedef struct {
    int rank;
    enum field field;
    uint64_t value;
} want;
double now_s(void);
void pause_core(void);
void futex_wait(word *w, uint32_t seen, long ns);
void futex_wake(word *w, int count);
void publish(group *g, enum field field, uint64_t value);
bool reached(group *g, int rank, enum field field, uint64_t value);
bool await(group *g, const want *w, bool idle); /* false: a slice of time has passed. `idle`: nothing else to do */
int peer_fault(group *g, int rank, int *culprit);
int group_fault(const group *g, int *culprit);
void fail_group(group *g, int fault, int culprit);
void ring(word *bell);
void ring_messages(group *g, int rank);

/* cores.c */
void tell_core(group *g);               /* by a caller */
void look_for_room(group *g, int rank); /* before a caller waits for `rank`; under `turn_lock` */

/* collective.c */
bool step(op *call, want *blocked); /* as far as it goes without waiting; true: over, in either way */
/* Of calls in windows: one touches memory that the one before it writes, or writes what that one reads. */
bool depends(const op *call, const op *before);
/* Both in windows, and the one before not over: all but the end. True: the one behind it may go on, too. */
bool step_ahead(op *call, const op *before);

/* message.c */
bool progress_messages(group *g);
void check_messages(group *g);
void post_message(op *message);
void drop_messages(group *g);
void set_deadline(op *message);
bool fits_ring(const group *g); /* under `message_lock` */
bool messages_rest(group *g);
void ring_receivers(group *g);

/* window.c */
window *window_of(group *g, const char *from, uint64_t bytes); /* the caller's to drop; NULL where there is none */
bool is_mapped(window *w, int *missing);                       /* by this rank, from all others; under `turn_lock` */
void drop_window(window *w);

/* progress.c; under `turn_lock`, but for those of messages and the last three */
op *first_call(group *g);
op *advance(group *g, want *blocked);
void run(group *g, const op *last, bool idle);
void advance_or_judge(group *g, const op *last);
bool all_rest(const group *g);
bool look_at_messages(group *g); /* true: something went */
void wait_messages(group *g, const op *until);
void ring_done(group *g);
void start_worker(group *g, worker *w);
void wake_worker(group *g, worker *w);

/* group.c */
bool join_users(group *g);
void part_users(group *g);
void release_group(group *g);

/* op.c */
op *new_op(group *g, const signature *what);
void finish(op *call, enum outcome outcome);
void fail(op *call, int fault, int culprit);
void shoal_drop(op *call);

/* calls.c */
op *shoal_start(group *g, const signature *what, char *send, char *receive, bool wait_at_once);
op *shoal_message(group *g, int kind, int dtype, char *data, uint64_t bytes, int peer, int64_t tag, bool wait_at_once);
int shoal_wait(op *call, double patience_s, bool idle);

#endif
