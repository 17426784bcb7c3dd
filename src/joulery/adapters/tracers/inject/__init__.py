"""Recorder code that runs inside a traced program; it imports only the standard library and the framework."""

SETTINGS = "JOULERY_TRACE"
"""Environment variable with the settings of the recorder, as JSON (framework, folder, schedule)."""
