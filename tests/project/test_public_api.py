"""What users rely on stays, or changes on purpose."""

import difflib

import public_api


def test_the_public_interface_is_the_recorded_one():
    recorded, found = public_api.RECORD.read_text(encoding="utf-8").splitlines(), list(public_api.lines())
    changes = list(difflib.unified_diff(recorded, found, "recorded", "found", n=0, lineterm=""))
    assert not changes, "\n".join([*changes, "if that is meant: python -P tests/public_api.py, and docs/stability.md"])
