"""joulery: where the joules and grams of machine learning go, and how to use fewer."""

__version__ = "0.1.0"
