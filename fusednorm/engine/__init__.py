"""Which backend takes a call, and running it: requests, substitutes, first calls, and the fast path in C."""
