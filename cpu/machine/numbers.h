/* Numbers that were measured, and that kernels have compiled in; run/tuning.c has those that processors want otherwise. */
#ifndef FUSEDNORM_NUMBERS_H
#define FUSEDNORM_NUMBERS_H

#include "abi/call.h"

enum { FN_ALIGNMENT = 64 }; /* bytes to which buffers are aligned: a cache line */

/* Fewer rows are not worth widening the weight for; a block of a chain has at least so many. */
enum { FN_ONE_KIND_ROWS = 4 };

/* Calls of fewer elements run on one thread: waking a second one costs more than it saves. */
#define FN_PARALLEL_ELEMENTS (32 * 1024)

/* The bytes of rows that a forward pass takes together. Twice as many were slower from memory. */
enum { FN_BATCH_BYTES = 16 * 1024 };

/* Elements after which two norms read what they fetch. One segment was slower for float. */
enum { FN_AHEAD_OF_PASSES = 2 * FN_SEGMENT };

/* The longest rows that are fetched while the row before is computed: both fit the second cache. */
enum { FN_FETCHED_ROW = 8 * FN_SEGMENT };

/* Elements of gates that are computed together, and that a thread takes at least: their buffers stay in the first cache. */
enum { FN_GATE_TILE = 512 };

#endif
