"""What runs inside a traced program: the standard library and the program's own framework, nothing else of joulery."""
