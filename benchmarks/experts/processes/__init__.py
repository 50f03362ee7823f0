"""Programs that run in processes of their own, started by their path; what they share needs torch and weft's layers.

callers.py   threads that call and call     module.py   the expert, with known weights     words.py   questions, answers
"""
