"""Programs that run in their own processes, started by their path; their shared code needs torch and torchweft's
layers.

callers.py   threads that call and call     module.py   the expert, with known weights     words.py   questions, answers
"""
