"""Rows in one level of strides, for backends that know no other."""

from fusednorm.calls.memory import in_one_level

__all__ = ["in_one_level"]
