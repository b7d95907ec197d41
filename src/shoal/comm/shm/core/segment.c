/* Segments, and where things lie in them. All offsets are multiples of a cache line; places and rings begin at a page. */

#define _GNU_SOURCE
#include "core.h"

#include <sys/mman.h>
#include <sys/stat.h>

#define PAGE 4096
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14, glibc 2.35 */
#endif

EXPORT void *shoal_map(int descriptor, uint64_t bytes) {
    struct stat found;
    if (fstat(descriptor, &found) != 0 || (uint64_t)found.st_size != bytes) return NULL;
    void *segment = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return segment == MAP_FAILED ? NULL : segment;
}

EXPORT void shoal_unmap(void *segment, uint64_t bytes) { munmap(segment, bytes); }

static uint64_t rounded(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

static uint64_t place_header_bytes(int size) { return rounded(sizeof(place_header) + 8 * (uint64_t)size, LINE); }

static uint64_t channels_at(int size, const settings *s) {
    return rounded(sizeof(header), LINE) + s->places * place_header_bytes(size);
}

static uint64_t places_at(int size, const settings *s) {
    return rounded(channels_at(size, s) + (uint64_t)size * sizeof(channel), PAGE);
}

static uint64_t rings_at(int size, const settings *s) {
    return rounded(places_at(size, s) + s->places * s->place_bytes, PAGE);
}

EXPORT uint64_t shoal_segment_bytes(int size, const settings *s) {
    return rounded(rings_at(size, s) + (uint64_t)size * s->ring_bytes, PAGE);
}

place_header *place_header_of(const group *g, int rank, uint64_t turn) {
    uint64_t index = turn % g->settings.places;
    char *first = (char *)g->peers[rank] + rounded(sizeof(header), LINE);
    return (place_header *)(first + index * place_header_bytes(g->size));
}

char *place_of(const group *g, int rank, uint64_t turn) {
    uint64_t index = turn % g->settings.places;
    return (char *)g->peers[rank] + places_at(g->size, &g->settings) + index * g->settings.place_bytes;
}

/* Small calls take one place after the other. All of those get memory at the first of them: page by page, when their
   turn comes, it would make each of the first calls several times as long. A kernel that cannot does nothing. */
void ready_places(group *g, uint64_t bytes) {
    if (bytes <= g->ready_bytes || bytes > g->settings.one_shot_bytes) return;
    g->ready_bytes = rounded(bytes, PAGE);
    for (uint64_t turn = 0; turn < g->settings.places; turn++)
        madvise(place_of(g, g->rank, turn), g->ready_bytes, MADV_POPULATE_WRITE);
}

channel *channel_of(const group *g, int from, int to) {
    return (channel *)((char *)g->peers[from] + channels_at(g->size, &g->settings)) + to;
}

char *ring_of(const group *g, int from, int to) {
    return (char *)g->peers[from] + rings_at(g->size, &g->settings) + (uint64_t)to * g->settings.ring_bytes;
}
