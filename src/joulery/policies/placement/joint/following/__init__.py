"""Joint plans that follow a running one, and the triggers for making them."""
