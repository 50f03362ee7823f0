"""Status of a server over HTTP: a page for people, its numbers as JSON, and Prometheus metrics.

http.py serves them, metrics.py holds the table of metrics. Their only input is ``Server.status()``, plain values.
"""
