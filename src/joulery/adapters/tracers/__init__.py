"""What ran when, from the profilers of the frameworks: files they leave and programs they run in."""
