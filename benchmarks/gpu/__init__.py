"""Everything that can be asked of torchweft on a GPU, in one command of at most eight minutes.

command.py   the command line, the deadlines of the sections, the report
jobs.py      subprocesses with deadlines: a crash or hang of one does not end the others
checks.py    laws that must hold on one or two GPUs, each a function
speed.py     memory and time against plain PyTorch

Nothing here needs more packages than torch. Without the extra `experts`, calls through gRPC are left out.
"""
