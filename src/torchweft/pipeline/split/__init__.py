"""Any model in stages: an ordinary forward() is recorded between its blocks, laid over stages, and replayed."""
