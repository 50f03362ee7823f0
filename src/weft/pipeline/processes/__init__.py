"""Connections between the processes of a pipeline: who takes part, messages, failures."""
