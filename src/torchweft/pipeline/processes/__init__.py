"""Connections between the processes of a pipeline: membership, messages, failures."""
