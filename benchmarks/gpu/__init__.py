"""Checks, tests and measurements of torchweft on a GPU, in one command of at most ten minutes.

command.py   command line, deadlines of the sections, report
jobs.py      subprocesses with deadlines, so that a crash or hang does not affect other jobs
checks.py    laws that must hold on one or two GPUs
speed.py     memory and time compared with plain PyTorch
pipelines.py pipelines of GPT blocks, in one process and over ranks

Only torch is required. Without the extra `experts`, calls over gRPC are omitted.
"""
