"""The conformance kit: the tests that a backend must pass to be one, for backends of fusednorm and of others.

    python -m fusednorm conformance --backend NAME
    pytest -p fusednorm.conformance.plugin --pyargs fusednorm.conformance --backend NAME
    FUSEDNORM_BACKEND=NAME pytest --pyargs fusednorm.conformance

It ends in a certificate: which promises of the specification hold for which dtypes, how many comparisons of bits say
so, and, where one fails, a script that shows the first difference. ``pip install '.[conformance]'`` in the checkout
installs what it needs.
"""
