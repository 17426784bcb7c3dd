"""Settings of devices on loan, and the watchdog that takes them back."""
