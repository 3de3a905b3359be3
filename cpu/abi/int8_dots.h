/* Sums of products of int8 numbers, of a few rows and columns at once (variants/int8_dots.c). */
#ifndef FUSEDNORM_INT8_DOTS_H
#define FUSEDNORM_INT8_DOTS_H

#include <stdint.h>

enum { FN_INT8_VECTOR = 64 }; /* the elements of whose multiples rows have room */

struct fn_int8_dots {
    int64_t size; /* bytes of an element of a row, as take_row writes it */
    void (*take_row)(const int8_t *row, int64_t n, void *to); /* with zeros up to whole vectors */
    /* sums[r * step + c], modulo 2^32, of rows and columns that lie so many bytes apart; of the columns n elements are read. */
    void (*dots)(int rows, const void *x, int64_t row_step, int columns, const int8_t *w, int64_t w_step, int64_t n, int32_t *sums, int64_t step);
    int64_t offset; /* what is added to each element of a column: so many times the sum of the row is in each sum */
};
/* The bytes of a row, of whole vectors. */
static inline int64_t fn_int8_row(int64_t size, int64_t n) { return (n + FN_INT8_VECTOR - 1) / FN_INT8_VECTOR * FN_INT8_VECTOR * size; }
const struct fn_int8_dots *fn_int8_dots(void); /* of the instruction set in use */
const struct fn_int8_dots *fn_int8_dots_of(const char *isa); /* the best for an instruction set, on this processor */

int fn_has_avx512_vnni(void);
int fn_has_avx_vnni(void);
int fn_has_neon_dot(void);

#endif
