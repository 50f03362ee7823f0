"""Benchmarks against peers: each one runs all candidates in turn, in one process, and prints a table of ratios.

One worker is one core, so that stages gain only by running at the same time. Threads started by a peer read their
number of intra-op threads from the environment, which must be set before torch is imported.
"""

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
