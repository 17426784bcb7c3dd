"""Clover (SC'23): its evaluation, the claims and their page."""
