"""The conformance kit: the tests that every backend must pass, of fusednorm or of another package.

    python -m fusednorm conformance --backend NAME
    pytest -p fusednorm.conformance.plugin --pyargs fusednorm.conformance --backend NAME
    FUSEDNORM_BACKEND=NAME pytest --pyargs fusednorm.conformance

It prints a certificate: the promises of the specification that hold for each dtype, the number of comparisons of bits,
and, if one fails, a script that reproduces the first difference. ``pip install '.[conformance]'`` in the checkout
installs pytest, hypothesis and NumPy, which it needs.
"""
