"""Whole loops in C++: a captured step becomes three functions that run over time without coming back to Python.

captured step   halves.py, totals.py   which operators run forward, which backward, what is summed over time;
     |           live.py              which products may skip rows
  values        lower.py               operators become values and views of values; with maker.py, handlers.py,
     |                                 operators.py, convolution.py
 functions      build.py               forward, again, backward: what each reads and writes
     |
  phases        phases.py              bulk work and loops;  function.py, place.py: where every value lives
     |
   order        order.py               groups.py: what is one pass over memory;  rows.py: may threads take rows
     |
   text         emit.py                nest.py, reductions.py, products.py, sums.py, packs.py, c_types.py
     |
  library       program.py             compiler.py, kernels.cpp (matrix products), loops.h (exp, tanh and the like)
     |
  engine        engine.py              memory by address;  outline.py: all of it told to a person
"""
