"""How far an adapter may be from its peer, and how far it must be with the wrong flags.

Peers sum in an order of their own and take another reciprocal root. The derivation is section 4's of the specification;
`u` is half the spacing of floating-point numbers at 1, and errors are to first order in it:

- Ours: d = log2 N additions on the way of a term; rstd within (d + 1 + 2) / 2 + 2, y within 3 more, with an offset.
- Theirs: in whatever order N terms are added, none passes through more than N - 1 additions. The root is no worse than
  2 ulp, 4 u, as NVIDIA documents for rsqrtf; one over a square root has two roundings. So rstd is within
  (N - 1 + 1 + 2) / 2 + 4, and y within 3 more.

In float32 the two are at most the sum of both apart; u |y| is at most one ulp, so that is a bound in ulp. In 16 bits
this bound is less than a tenth of an ulp for the sizes tested here, so before the last rounding two values are at most
that far apart, and after it at most one ulp. With round_norm=True that holds for the normalised row, and then for y: an
ulp of the one is less than two ulp of the other, so y is at most two ulp apart.
"""

import functools
import math

import pytest
import torch

from fusednorm.conformance.cases import differing
from fusednorm.tools.measure.compare import ulps


def same(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual.detach(), expected.detach())


def same_bytes(actual, expected):
    assert actual.dtype == expected.dtype
    same(actual.view(torch.uint8), expected.view(torch.uint8))


def fp8(v):
    return v.clamp(-448, 448).to(torch.float8_e4m3fn)


def limit(y, round_norm):
    """The bound in ulp."""
    n = y.shape[-1]
    units = (math.ceil(math.log2(n)) + 3) / 2 + 2 + 3 + (n + 2) / 2 + 4 + 3
    if y.dtype in (torch.float32, torch.float64):
        return units
    assert units * 2**-24 / torch.finfo(y.dtype).eps < 0.1
    return 2 if round_norm else 1


@functools.cache
def torchs_tests(name):
    """What torch's own tests know of a function of ``torch.nn.functional``: operands, and calls that raise."""
    pytest.importorskip("expecttest", reason="torch's tests import it; tox installs it")
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    [found] = [operation for operation in op_db if operation.name == f"nn.functional.{name}"]
    return found


def layer_norm_bound(rows, weight, bias, eps, y):
    """How far our LayerNorm of rows, [..., N], and torch's may be apart, elementwise; y is one of both.

    H is the greatest magnitude of a row. Each step of torch's mean (Welford's) has roundings of numbers of at most 2 H,
    whose sizes sum to at most 5 H, and later steps enlarge none of them: N steps are within 5 N u H, and our tree is
    within N u H. The variance is within 6 N u H std of both (Chan, Golub and LeVeque: the relative error grows with the
    root mean square over the standard deviation), so that rstd is within 3 N u H rstd, relatively, and four roundings.
    A subtraction, or torch's ``x * rstd - mean * rstd``, adds 3 u H rstd. The weight and the bias are two roundings
    more. In 16 bits both are rounded at last: at most one step apart.
    """
    dtype, n = rows.dtype, max(rows.shape[-1], 1)
    rows = rows.double()
    u = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    d = rows - rows.mean(-1, keepdim=True)
    rstd = (d.square().mean(-1, keepdim=True) + eps).rsqrt()
    greatest = rows.abs().amax(-1, keepdim=True) * rstd
    normed = d.abs() * rstd
    apart = 2 * u * ((5 * n + 3) * greatest + normed * (3 * n * greatest + 4))
    weight, bias = (1.0 if weight is None else weight.double().abs()), (0.0 if bias is None else bias.double().abs())
    step = torch.finfo(dtype).eps if torch.finfo(dtype).bits == 16 else 0.0
    return weight * apart + 4 * u * (weight * normed + bias) + step * y.double().abs()


def agree(what, actual, wanted, round_norm):
    """Asserts that no element is farther off than the bound; returns the share that differs at all."""
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape
    apart, bound = ulps(actual, wanted), limit(actual, round_norm)
    share = differing(actual, wanted).double().mean().item()
    name = str(actual.dtype)[6:]
    print(f"{what}, {name}: {share:.1e} differ, {(apart > 1).double().mean().item():.1e} by more than one ulp")
    assert apart.max() <= bound, f"{what}: {apart.max()} ulp apart, more than {bound}"
    return share


def disagree(what, actual, wanted, right):
    """Asserts that another rounding would have shown: `right` is what :func:`agree` returned."""
    if actual.dtype in (torch.float32, torch.float64):
        assert ulps(actual, wanted).max() > limit(actual, False), f"{what}: within the bound"
        return
    share = differing(actual, wanted).double().mean().item()
    print(f"{what}, {str(actual.dtype)[6:]}: {share:.1e} differ")
    assert share > 0.05, f"{what}: only {share:.1e} of the elements differ"
    assert share > 20 * right, f"{what}: {share:.1e} of the elements differ, {right:.1e} with the right flags"


def backward_bounds(h, weight, offset, eps, dy, d_total, round_norm):
    """Two functions of our gradient and a peer's (in float64) that give the bounds of their distance, elementwise.

    For the rows h, [M, N], and for the weight, [N]. Counted as above, along the longest way of a term through the
    formulas of section 5, with rstd within r: c within d + r + 5, dh within d + 3 r + 9, its sum with d_total one more;
    the peer multiplies by rstd thrice, each a rounding of its own, and by -1 / N, which makes it one more still, with
    N - 1 for d. The errors are relative to the sum of the magnitudes, not to the result. In 16 bits each result is
    rounded: at most half an ulp each. With Liger's "llama" the normalised row and its product with dy are rounded, too,
    in the weight's gradient: half an eps each.
    """
    rows, n = h.shape
    u, step = 2.0**-24, torch.finfo(h.dtype)
    depth = math.ceil(math.log2(n))
    ours, theirs = (depth + 3) / 2 + 2, (n + 2) / 2 + 4
    h, dy = h.double(), dy.double()
    rstd = (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    wdy, xhat = dy * (weight.double() + offset), h * rstd
    size = rstd * (wdy.abs() + xhat.abs() * (wdy * xhat).abs().mean(-1, keepdim=True))
    if d_total is not None:
        size = size + d_total.double().abs()
    row = (depth + 3 * ours + 10 + n + 3 * theirs + 10) * u * size
    column = (ours + theirs + 2 * rows + 3) * u * (dy * xhat).abs().sum(0)
    narrow = h.new_tensor(step.eps if step.bits == 16 else 0.0)
    if round_norm:
        column = column + narrow * (dy * xhat).abs().sum(0)

    def bound(inexact):
        return lambda a, b: inexact + narrow * torch.maximum(a.double().abs(), b.abs()).clamp(step.smallest_normal)

    return bound(row), bound(column)
