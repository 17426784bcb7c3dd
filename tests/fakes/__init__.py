"""Vendors' surfaces, faithful and invented: for any test that needs a device this machine does not have."""
