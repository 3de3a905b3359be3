"""Calls as values and their checks: dtypes, shapes, memory, and whether torch must see a call. No backend is known."""
