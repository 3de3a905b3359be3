"""Products: whole numbers' results, the bound, torch's gradients, batches of all operands, outputs, and refusals."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fusednorm
from fusednorm import linear
from fusednorm.conformance import oracle_products
from fusednorm.conformance.cases import BF16, DTYPES, F16, F32, F64, differing
from fusednorm.operations.front_door import PUBLIC
from fusednorm.reference import norm as reference
from fusednorm.reference import products

# What torch warns of when it loads its forward mode and its compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]

X, D = torch.randn(2, 4, 6, 40, generator=torch.Generator().manual_seed(0))
WEIGHT, BIAS = torch.randn(7, 40, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 1, 7)

# One number after the other, as whole numbers of 2^-LEAST: the text of the specification, a third time.

LEAST = 2200
#: Significant bits, the exponent of the least number, and the greatest number.
FORMATS = {F16: (11, -24), BF16: (8, -133), F32: (24, -149), F64: (53, -1074)}


def fixed(number):
    numerator, denominator = number.as_integer_ratio()
    return (numerator << LEAST) // denominator


def rounded(whole, dtype):
    """To nearest even."""
    bits, least = FORMATS[dtype]
    lost = max(abs(whole).bit_length() - bits, least + LEAST)
    kept, rest = divmod(abs(whole), 1 << lost)
    kept += 2 * rest > 1 << lost or (2 * rest == 1 << lost and kept % 2)
    beyond = kept << lost > fixed(torch.finfo(dtype).max)
    return math.copysign(math.inf if beyond else math.ldexp(kept, lost - LEAST), -1 if whole < 0 else 1)


def added(a, b, s, wide, fused):
    """``a * b + s``, with one rounding or with two."""
    if not all(map(math.isfinite, (a, b, s))):
        return a * b + s
    product = fixed(a) * fixed(b) >> LEAST
    if not fused and math.isinf(held := rounded(product, wide)):
        return held
    return rounded((product if fused else fixed(held)) + fixed(s), wide)


def of_whole_numbers(x, weight, bias, out_dtype):
    wide = F64 if x.dtype == F64 else F32
    fused = {x.dtype, weight.dtype} <= {F16, BF16}
    found = []
    for row, (n, column) in itertools.product(x.tolist(), enumerate(weight.tolist())):
        sums = [0.0] * 16
        for k, (a, b) in enumerate(zip(row, column, strict=True)):
            sums[k % 16] = added(a, b, sums[k % 16], wide, fused)
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [added(1.0, a, b, wide, False) for a, b in zip(sums[:half], sums[half:], strict=True)]
        y = sums[0] if bias is None else added(1.0, sums[0], bias[n].item(), wide, False)
        found.append(rounded(fixed(y), out_dtype) if math.isfinite(y) else y)
    return torch.tensor(found, dtype=F64).view(len(x), len(weight))


def of_any_bits(shape, dtype, generator):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.randint(-(2**62), 2**62, shape, generator=generator).to(integers).view(dtype)


def wide_spread(shape, dtype, generator):
    exponents = torch.randint(-75, 66, shape, generator=generator)
    return (torch.randn(shape, generator=generator, dtype=F64) * 2.0**exponents).to(dtype)


def near_one(shape, dtype, generator):
    return (torch.randn(shape, generator=generator, dtype=F64) + 1).to(dtype)


@pytest.mark.parametrize("make", [of_any_bits, wide_spread, near_one])
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_results_are_those_of_whole_numbers(x_dtype, make):
    """Of the reference, the oracle and the backend of this run, with products that float32 does not hold."""
    generator = torch.Generator().manual_seed(3)
    for weight_dtype, size, out_dtype in itertools.product(DTYPES, (1, 15, 16, 17, 35), (x_dtype, F32)):
        if weight_dtype == F64 != x_dtype:
            continue
        x, weight = make((2, size), x_dtype, generator), make((3, size), weight_dtype, generator)
        bias = None if size % 2 else make((3,), weight_dtype, generator)
        wanted = of_whole_numbers(x, weight, bias, out_dtype)
        by_reference = products.linear(x, weight, bias, out_dtype)[0]
        by_oracle = torch.from_numpy(oracle_products.linear((x, weight, bias), (), out_dtype)[0])
        for found in (by_reference, by_oracle, linear(x, weight, bias, out_dtype=out_dtype)):
            assert not differing(found.double(), wanted).any(), (weight_dtype, size, out_dtype)


def test_a_fused_sum_has_one_rounding():
    """Products that float32 does not hold: of bfloat16, below its least number and above its greatest one."""
    a, b = torch.tensor([2.0**-75, 1.5 * 2.0**-75]).bfloat16(), torch.tensor([2.0**-75, 2.0**-75]).bfloat16()
    for own, other in ((a, b), (a * 2.0**140, b * 2.0**139)):
        assert linear(own[:1], other[:1].unsqueeze(0), out_dtype=F32).item() in (0.0, math.inf)
    x, weight = torch.zeros(17).bfloat16(), torch.zeros(1, 17).bfloat16()
    x[0], weight[0, 0], x[16], weight[0, 16] = 2.0**-75, 2.0**-74, 2.0**-75, 2.0**-75  # 1 and 1/2 of the least number
    assert linear(x, weight, out_dtype=F32).item() == 2.0**-148
    x[0], weight[0, 0], x[16], weight[0, 16] = -(2.0**64), 2.0**63, 2.0**64, 2.0**64
    assert linear(x, weight, out_dtype=F32).item() == 2.0**127
    assert linear(x.float(), weight, out_dtype=F32).item() == math.inf


@pytest.mark.parametrize("at_once", [16, 64, 200])
def test_parts_that_are_computed_at_once_do_not_matter(at_once, monkeypatch):
    wanted = products.linear(X[0].bfloat16(), WEIGHT.bfloat16(), BIAS)[0]
    sizes, tree = [], products._tree
    monkeypatch.setattr(products, "_AT_ONCE", at_once)
    monkeypatch.setattr(products, "_tree", lambda x, w, wide: sizes.append(len(x) * len(w)) or tree(x, w, wide))
    assert torch.equal(products.linear(X[0].bfloat16(), WEIGHT.bfloat16(), BIAS)[0], wanted)
    assert sum(sizes) == 42
    assert max(sizes) <= at_once // 16


@pytest.mark.parametrize(("dtype", "out_dtype"), [(BF16, F32), (F32, F32), (F64, F64)])
@pytest.mark.parametrize("size", [1, 5, 16, 40, 1000])
def test_errors_are_within_the_bound(dtype, out_dtype, size):
    generator = torch.Generator().manual_seed(size)
    x, weight = (torch.randn(6, size, generator=generator, dtype=F64).to(dtype) for _ in range(2))
    bias = torch.randn(6, generator=generator).to(dtype)
    additions = -(-size // 16) - 1 + math.ceil(math.log2(min(size, 16))) + 1
    count, u = additions + (dtype != BF16), Fraction(torch.finfo(out_dtype).eps) / 2
    gamma = count * u / (1 - count * u)
    found = linear(x, weight, bias, out_dtype=out_dtype)
    for (m, row), (n, column) in itertools.product(enumerate(x.tolist()), enumerate(weight.tolist())):
        terms = [fixed(a) * fixed(b) >> LEAST for a, b in zip(row, column, strict=True)] + [fixed(bias[n].item())]
        error = abs(fixed(found[m, n].item()) - sum(terms))
        assert error <= gamma * Fraction(sum(map(abs, terms)))


def leaves(*operands):
    return [t.clone().requires_grad_() for t in operands]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_torchs_products(dtype):
    x, weight, bias = leaves(X.to(dtype), WEIGHT.to(dtype), BIAS.to(dtype))
    y = linear(x, weight, bias)
    d = D[..., :7].to(dtype)
    found = torch.autograd.grad(y, (x, weight, bias), d)
    rows = d.reshape(-1, 7)
    wanted = d @ weight, rows.t() @ x.reshape(-1, 40), rows.sum(0)
    for gradient, expected in zip(found, wanted, strict=True):
        assert gradient.dtype == dtype
        assert torch.equal(gradient, expected)


def test_gradients_of_several_dtypes_are_rounded_once():
    """Computed in float32, or in float64 for x of that."""
    for x_dtype, weight_dtype, bias_dtype, out_dtype in (
        (BF16, F32, F16, None),
        (F16, BF16, F32, F32),
        (F64, BF16, F16, F32),
        (BF16, BF16, BF16, F32),
        (BF16, BF16, F32, None),
    ):
        wide = F64 if x_dtype == F64 else F32
        x, weight, bias = leaves(X.to(x_dtype), WEIGHT.to(weight_dtype), BIAS.to(bias_dtype))
        y = linear(x, weight, bias, out_dtype=out_dtype)
        d = D[..., :7].to(y.dtype)
        found = torch.autograd.grad(y, (x, weight, bias), d)
        of_x, of_weight = x.detach().to(wide), weight.detach().to(wide)
        rows = d.to(wide).reshape(-1, 7)
        wanted = d.to(wide) @ of_weight, rows.t() @ of_x.reshape(-1, 40), rows.sum(0)
        for leaf, gradient, expected in zip((x, weight, bias), found, wanted, strict=True):
            assert gradient.dtype == leaf.dtype
            assert torch.equal(gradient, reference.rounded(expected, leaf.dtype))


def test_derivatives():
    """Of both orders and in both directions; without a bias; and of no rows and no columns."""
    given = [t.double() for t in (X[:1, :2, :5], WEIGHT[:3, :5], BIAS[:3])]
    for operands in (given, given[:2]):
        assert gradcheck(linear, leaves(*operands), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(linear, leaves(*operands), check_fwd_over_rev=True)
    for place, operand in enumerate(given):
        (alone,) = leaves(operand)
        assert gradcheck(lambda t, at=place: linear(*given[:at], t, *given[at + 1 :]), alone, check_forward_ad=True)
    for x, weight in ((X[:0], WEIGHT), (X, WEIGHT[:0])):
        a, b, c = leaves(x, weight, BIAS[: len(weight)])
        y = linear(a, b, c)
        assert y.shape == (*x.shape[:-1], len(weight))
        for leaf, gradient in zip((a, b, c), torch.autograd.grad(y.sum(), (a, b, c)), strict=True):
            assert torch.equal(gradient, torch.zeros_like(leaf))


def test_batches_of_each_operand():
    """As one call has them, or as many: ``vmap`` of rows, of matrices, of biases, and of all."""
    wanted = linear(X, WEIGHT, BIAS)
    assert torch.equal(torch.vmap(linear, (0, None, None))(X, WEIGHT, BIAS), wanted)
    matrices, biases = torch.stack((WEIGHT, WEIGHT.flip(0))), torch.stack((BIAS, BIAS.flip(0)))
    both = [linear(X, weight, bias) for weight, bias in zip(matrices, biases, strict=True)]
    assert torch.equal(torch.vmap(linear, (None, 0, 0))(X, matrices, biases), torch.stack(both))
    assert torch.equal(
        torch.vmap(linear, (None, 1, 1), 2)(X, matrices.mT.mT.movedim(0, 1), biases.mT), torch.stack(both, 2)
    )
    alone = [linear(X, WEIGHT, bias) for bias in biases]
    assert torch.equal(torch.vmap(linear, (None, None, 0))(X, WEIGHT, biases), torch.stack(alone))
    each = [linear(x, weight) for x, weight in zip(X[:2], matrices, strict=True)]
    assert torch.equal(torch.vmap(linear)(X[:2], matrices), torch.stack(each))

    def of_each(weight):
        return linear(X.round(), weight).square().sum()

    # Of whole numbers, whose sums are exact: torch's products of batches have other bits than those of each.
    wanted = [torch.func.grad(of_each)(weight) for weight in matrices.round()]
    assert torch.equal(torch.vmap(torch.func.grad(of_each))(matrices.round()), torch.stack(wanted))


def test_compiled_calls():
    """Without a break, of the operator; with gradients."""
    compiled = torch.compile(lambda *operands: linear(*operands) * 2, fullgraph=True, backend="aot_eager")
    found, wanted = leaves(X, WEIGHT, BIAS), leaves(X, WEIGHT, BIAS)
    y, expected = compiled(*found), linear(*wanted) * 2
    assert torch.equal(y, expected)
    for a, b in zip(
        torch.autograd.grad(y, found, D[..., :7]), torch.autograd.grad(expected, wanted, D[..., :7]), strict=True
    ):
        assert torch.equal(a, b)


def test_outputs():
    """Of another dtype, in rows apart, and in a tensor that autograd is told of."""
    wanted = linear(X, WEIGHT, BIAS, out_dtype=BF16)
    out = torch.zeros(4, 6, 9, dtype=BF16)[..., 1:8]
    before = out._version
    assert linear(X, WEIGHT, BIAS, out=out) is out
    assert out._version > before
    assert torch.equal(out, wanted)
    assert torch.equal(linear(X, WEIGHT, BIAS, out=out, out_dtype=BF16), wanted)
    assert "linear_" not in {function.__name__ for function in PUBLIC}


SQUARE = torch.zeros(40, 40)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: linear(X, WEIGHT.t()),
            ValueError,
            r"weight must have shape \[N, 40\], where the last dimension of x .*, got \[40, 7\]; pass weight\.t\(\)",
        ),
        (lambda: linear(X, WEIGHT[0]), ValueError, r"weight must have shape \[N, 40\].* got \[40\]; pass a row as"),
        (
            lambda: linear(X, WEIGHT[:, :7]),
            ValueError,
            r"weight must .* got \[7, 7\]; pass a row as long as those of x",
        ),
        (
            lambda: linear(X, WEIGHT, BIAS[:6]),
            ValueError,
            r"bias must have shape \[7\], a number for each row of weight, got \[6\]; pass one for each",
        ),
        (lambda: linear(X, WEIGHT, BIAS[0]), ValueError, r"bias must have shape \[7\], .*, got \[\]"),
        (lambda: linear(X, 3), TypeError, "weight must be a torch.Tensor, got int; torch.as_tensor makes one"),
        (lambda: linear(X, WEIGHT, 1.0), TypeError, "bias must be a torch.Tensor, got float; torch.as_tensor makes"),
        (lambda: linear(X, WEIGHT.double()), TypeError, "weight is float64 while x is float32"),
        (lambda: linear(X, WEIGHT, BIAS.int()), TypeError, "bias must be float16, bfloat16, float32 or float64"),
        (lambda: linear(X[0, 0, 0], WEIGHT), ValueError, r"x must be \[\.\.\., N\] with N of at least 1"),
        (lambda: linear(X[..., :0], WEIGHT[:, :0]), ValueError, r"x must be \[\.\.\., N\] with N of at least 1"),
        (lambda: linear(X, WEIGHT, out_dtype=F64), TypeError, "out_dtype is float64 while x is float32"),
        (lambda: linear(X, WEIGHT, out=X), ValueError, r"out must have shape \[4, 6, 7\], got \[4, 6, 40\]; allocate"),
        (lambda: linear(X, WEIGHT, out=[]), TypeError, "out must be a torch.Tensor, got list; allocate it"),
        (
            lambda: linear(X, WEIGHT, out=torch.zeros(4, 6, 7), out_dtype=BF16),
            TypeError,
            "out must have the dtype out_dtype bfloat16, got float32; pass either, not both",
        ),
        (lambda: linear(SQUARE, SQUARE.clone(), out=SQUARE), ValueError, "out shares memory with x"),
        (lambda: linear(SQUARE.clone(), SQUARE, out=SQUARE), ValueError, "out shares memory with weight"),
        (
            lambda: linear(SQUARE[:1], WEIGHT, SQUARE[2, :7], out=SQUARE[2:3, :7]),
            ValueError,
            "out shares memory with bias",
        ),
        (
            lambda: linear(X, *leaves(WEIGHT), out=torch.zeros(4, 6, 7)),
            RuntimeError,
            r"linear\(\): functions with out=... arguments don't support automatic differentiation",
        ),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error, match=f"^{words}"):
        call()


def test_explanations_name_it():
    text = str(fusednorm.explain(X, function=linear))
    assert "linear runs by" in text
