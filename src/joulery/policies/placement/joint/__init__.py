"""One plan over variant, share, batch, clock, GPU type and count, with a bound."""
