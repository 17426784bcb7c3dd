"""Leased device settings, and the watchdog that reverts them."""
