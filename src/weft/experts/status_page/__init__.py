"""Status of a server over HTTP: a page for people, its numbers as JSON, and Prometheus metrics.

    Server.status() ──┬──────────────> GET /status.json ──> page.html, at GET /
                      '─> metrics.py ─> GET /metrics

http.py serves them. Nothing here knows the server: its one input is the status, plain values as JSON has them.
"""
