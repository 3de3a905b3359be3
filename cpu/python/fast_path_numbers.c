/* Numbers that are no tensors, rounded once to the type of the computation. */
#include "python/fast_path.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* The nearest float, ties to even; in integers, because the thread may flush subnormals or round otherwise. */
static double in_float(double value) {
    if (value == 1) return value;
    if (value == 0) return 0 * value; /* which may be subnormal, where the thread takes that for 0 */
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint64_t sign = bits >> 63 << 63, magnitude = bits ^ sign;
    const int exponent = (int)(magnitude >> 52), least_normal = 1023 - 126, dropped = 29;
    double found;
    if (exponent == 0x7ff) return value;
    if (exponent >= least_normal) {
        bits = (magnitude + (UINT64_C(1) << (dropped - 1)) - 1 + (magnitude >> dropped & 1)) >> dropped << dropped;
        memcpy(&found, &bits, sizeof found);
        if (found > FLT_MAX) found = INFINITY;
    } else {
        const int more = dropped + least_normal - exponent; /* of units of 2^-149 */
        const uint64_t fraction = (magnitude & ((UINT64_C(1) << 52) - 1)) | UINT64_C(1) << 52;
        found = more > 53 ? 0 : (double)((fraction + (UINT64_C(1) << (more - 1)) - 1 + (fraction >> more & 1)) >> more) * 0x1p-149;
    }
    return sign ? -found : found;
}

static double rounded(double value, int wide) { return wide ? value : in_float(value); }

int fn_read_float(PyObject *number, int wide, double *value) {
    if (Py_TYPE(number) != &PyFloat_Type) return 0;
    *value = rounded(PyFloat_AsDouble(number), wide);
    return 1;
}

int fn_read_number(PyObject *number, int wide, double *value) {
    if (Py_TYPE(number) != &PyFloat_Type && Py_TYPE(number) != &PyLong_Type) return 0;
    *value = rounded(PyFloat_AsDouble(number), wide);
    if (*value == -1 && PyErr_Occurred()) {
        PyErr_Clear(); /* Python names the number that a double does not hold */
        return 0;
    }
    return 1;
}

int fn_read_normal(PyObject *number, int wide, double *value) {
    return fn_read_number(number, wide, value) && *value >= (wide ? DBL_MIN : FLT_MIN) && *value <= (wide ? DBL_MAX : FLT_MAX);
}
