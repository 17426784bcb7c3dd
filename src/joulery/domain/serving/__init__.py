"""What is served, how well, and on what."""
