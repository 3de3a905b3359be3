"""The specification in torch operations: docs/spec.md, one file for each kind of formula."""
