"""What runs inside a traced program: the standard library and the program's own framework, nothing else of joulery."""

ORDERS = "JOULERY_TRACE"
"""Variable that holds the orders of the recorder, as JSON (framework, folder, schedule)."""
