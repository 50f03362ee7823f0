"""Whole loops in C++: a captured step becomes three functions that run over time without coming back to Python.

captured step    partitioner.py   forward or backward, C or PyTorch; what is summed over time, which rows may be skipped
     |
  values         lowering.py      nodes become values (ir.py), by operators.py; larger ones are decomposed before
     |
 functions       scheduling.py    bulk work and loops over time, memory of every value, fusion, rows shared by threads
     |
  C++ text       codegen.py       loops over time and elements; gemm.py: matrix products, sums over time
     |
  library        compiler.py      with kernels.cpp (matrix products) and loops.h (exp, tanh and the like)
     |
  backend        backend.py       runs a sequence: memory by address, threads, and PyTorch beside the loops
"""
