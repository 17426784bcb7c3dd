"""Clover's study: schemes that choose configurations hour by hour."""
