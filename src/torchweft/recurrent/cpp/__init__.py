"""Whole loops in C++: a captured step becomes three functions that run over time without returning to Python.

captured step    partitioner.py   forward or backward, C or PyTorch; sums over time; rows without products
     |
  values         lowering.py      nodes become values (ir.py), by operators.py; larger ones are decomposed before
     |
 functions       scheduling.py    bulk work and loops over time, memory of every value, fusion, rows shared by threads
     |
  C++ text       codegen.py       loops over time and elements; gemm.py: matrix products, sums over time
     |
  library        compiler.py      with kernels.cpp (matrix products) and loops.h (exp, tanh and the like)
     |
  backend        cpp_backend.py   runs a sequence: addresses, threads, and PyTorch's share; workspace.py: its memory
"""
