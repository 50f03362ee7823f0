"""Programs of helper processes, started by path. Shared code:

callers.py   concurrent callers     module.py   the expert, with known weights     words.py   protocol of the helpers
"""
