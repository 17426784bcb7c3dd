"""Traces: events, call stacks, operators."""
