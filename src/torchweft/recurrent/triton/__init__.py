"""Loops over time as generated Triton kernels, for GPUs. The lowering of a step is that of the C++ backend.

captured step    cpp/lowering.py     values of one step, their schedule, and what PyTorch does for all steps at once
     |
  memory         memory.py           row axes of values, addresses in which the number of rows is a variable
     |
  fusion         fusion.py           products within passes, and the rotated backward loop
     |
 kernel text     kernels.py          a loop over time in one kernel, or a kernel per group. Its groups: emitter.py,
     |                               operations.py. Their expressions: expressions.py
  kernel         toolchain.py        Triton, or its interpreter
     |
  backend        triton_backend.py   runs a chunk: loops.py, bulk work of PyTorch (bulk.py), recordings of launches
"""
