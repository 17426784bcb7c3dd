"""Code that runs inside a traced program: the standard library and the program's own framework, no more of joulery."""

SETTINGS = "JOULERY_TRACE"
"""Environment variable with the settings of the recorder, as JSON (framework, folder, schedule)."""
