"""A gateway that shares its engine with others: its health, metrics, pages and labels."""
