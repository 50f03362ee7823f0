"""Status of a server over HTTP: a page for people, its numbers as JSON, and Prometheus metrics.

http.py serves them, metrics.py makes the metrics. Their one input is ``Server.status()``, plain values.
"""
